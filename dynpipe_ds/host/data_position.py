"""Where each stage is in the data, also the stages that read none.

Only the first and the last stage take micro-batches from the user's iterators. When the pipeline gets shorter,
a stage from its middle may become the last: its own iterators then have to skip what others have read.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dynpipe_ds.host import accelerator

_KEPT = 16
"""So many iterators that take no weak reference (``iter([...])``) are remembered."""


class DataPosition:
    """Counts the micro-batches that other stages took from their iterators and this one did not from its own."""

    def __init__(self) -> None:
        # By identity: iterators need not be hashable, nor compare as one thinks.
        self._behind: OrderedDict[int, tuple[Any, int]] = OrderedDict()

    def fall_behind(self, iterator: Any, num_micro_batches: int) -> None:
        """Note that other stages took micro-batches, and this one none from its iterator; ``None`` is no iterator."""
        if iterator is None:
            return
        key = id(iterator)
        reference, so_far = self._behind.pop(key, (None, 0))
        if reference is None:
            try:
                reference = weakref.ref(iterator, lambda _: self._behind.pop(key, None))
            except TypeError:
                reference = iterator
        self._behind[key] = reference, so_far + num_micro_batches
        while len(self._behind) > _KEPT:
            self._behind.popitem(last=False)

    def behind(self, iterator: Any) -> int:
        """Micro-batches that other stages took, and this one did not."""
        return self._behind.get(id(iterator), (None, 0))[1]

    def catch_up(self, iterator: Any) -> None:
        """Skip what others took, before this stage reads; leaves torch's random streams as they are.

        Raises:
            ValueError: if it ends before.
        """
        reference, behind = self._behind.pop(id(iterator), (None, 0))
        if not behind:
            return
        with same_random_streams():
            for taken in range(behind):
                try:
                    next(iterator)
                except StopIteration:
                    self._behind[id(iterator)] = reference, behind - taken
                    raise ValueError(
                        f"this rank's data iterator ended after {taken} micro-batches, but other ranks have taken "
                        f"{behind} from theirs; give every rank an iterator over the same data"
                    ) from None


class LateLoader:
    """An iterator over a loader that starts it at the first step, so that idle stages start no workers.

    Args:
        loader: an iterable.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self._loader = loader
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> LateLoader:
        return self

    def __next__(self) -> Any:
        if self._iterator is None:
            self._iterator = iter(self._loader)
        return next(self._iterator)


RandomStreams = tuple[torch.Tensor, torch.Tensor | None]
"""States of torch's: on the CPU, and on the device if there is one."""


def random_streams() -> RandomStreams:
    """Where torch's random streams are."""
    return torch.get_rng_state(), accelerator.random_state()


def set_random_streams(streams: RandomStreams) -> None:
    """Go on from where they were.

    Args:
        streams: as :func:`random_streams` gave them.
    """
    state, on_device = streams
    torch.set_rng_state(state)
    if on_device is not None:
        accelerator.set_random_state(on_device)


@contextmanager
def same_random_streams() -> Iterator[None]:
    """Loaders draw seeds; what is skipped shall leave no trace."""
    streams = random_streams()
    try:
        yield
    finally:
        set_random_streams(streams)
