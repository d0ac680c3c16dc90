"""A batch's samples in micro-batches of another size than those that the user's loader gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


class Slicing:
    """Joins and cuts what the loader gives, so that each batch has the same samples in the same order.

    Args:
        loader_size: samples of a micro-batch that the loader gives, as the JSON says.

    Attributes:
        loader_size: as given.
    """

    def __init__(self, loader_size: int) -> None:
        self.loader_size = loader_size
        self._size = loader_size
        self._held: Any = None
        self._obstacle: str | None = None
        self._is_first = True

    def begin(self, size: int | None) -> None:
        """Begin a batch; what was left of one that was dropped is given to nobody.

        Args:
            size: samples of a micro-batch; ``None``: as the loader gives them.
        """
        self._size = self.loader_size if size is None else size
        self._held, self._is_first = None, True

    def num_read(self, num_micro_batches: int) -> int:
        """Micro-batches that a batch takes from the loader.

        Args:
            num_micro_batches: that it has.
        """
        return num_micro_batches * self._size // self.loader_size

    def next(self, read: Callable[[], Any]) -> Any:
        """The next micro-batch.

        Args:
            read: gives the loader's next one.

        Raises:
            ValueError: if it can't be cut.
        """
        if self._size == self.loader_size:
            micro_batch = read()
            if self._is_first:  # so that it is known before it matters
                self._is_first, self._obstacle = False, _obstacle(micro_batch, self.loader_size)
            return micro_batch
        while self._held is None or _num_samples(self._held) < self._size:
            more = read()
            self._obstacle = _obstacle(more, self.loader_size)
            self.check()
            self._held = more if self._held is None else _joined([self._held, more])
        taken, held = _rows(self._held, 0, self._size), self._held
        left = _num_samples(held) - self._size
        self._held = _rows(held, self._size, self._size + left) if left else None
        return taken

    def check(self) -> None:
        """Refuse data that can't be cut.

        Raises:
            ValueError: if the newest micro-batch was one.
        """
        if self._obstacle is not None:
            raise ValueError(f"micro-batches of another size can't be cut from the data: {self._obstacle}")


def _tensors(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    else:
        yield value


def _obstacle(micro_batch: Any, size: int) -> str | None:
    """Why a micro-batch can't be cut along its samples."""
    for part in _tensors(micro_batch):
        if not isinstance(part, Tensor):
            return f"a micro-batch has a {type(part).__name__} in it; only tensors, in tuples and lists, can be cut"
        if part.dim() == 0 or part.shape[0] != size:
            return (
                f"a tensor of a micro-batch has the shape {tuple(part.shape)}; its first dimension must be that of the "
                f"{size} samples (train_micro_batch_size_per_gpu)"
            )
    return None


def _num_samples(micro_batch: Any) -> int:
    return int(next(_tensors(micro_batch)).shape[0])


def _rows(value: Any, first: int, end: int) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_rows(part, first, end) for part in value)
    return value[first:end]


def _joined(values: list[Any]) -> Any:
    if isinstance(values[0], tuple | list):
        return tuple(_joined(list(parts)) for parts in zip(*values, strict=True))
    return torch.cat(values)
