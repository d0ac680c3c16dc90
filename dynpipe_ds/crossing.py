"""What crosses the boundary between two stages: told in one message of fixed size, and the same until told anew.

The sender tells it before the first micro-batch of a batch, or before each one where the module has
``dynamic_shape=True``. A micro-batch that is of another kind can't be received then: zeros travel in its place, which
keep all ranks in step, and all of them refuse the batch before the optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from dynpipe_ds.layouts import Layout, contiguous_stride

META_SIZE = 256
"""Numbers (int64) in the message."""

Tensors = Tensor | tuple[Tensor, ...]

_FLAGGED, _PLAIN = 1, 2


def as_tuple(value: Tensors) -> tuple[Tensor, ...]:
    """What a layer takes or returns, as a tuple in any case.

    Args:
        value: a tensor or a tuple of tensors.
    """
    return value if isinstance(value, tuple) else (value,)


def distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Each tensor once, in order.

    Args:
        tensors: some may be the same object.
    """
    return list({id(tensor): tensor for tensor in tensors}.values())


@dataclass(frozen=True)
class Crossing:
    """A micro-batch's tensors, as kinds.

    A tensor that a tuple holds twice travels once, and is one tensor on the other side, too: its gradients are then
    added in the order of the undivided model.

    Attributes:
        layouts: of each tensor.
        flags: of an activation, whether it wants a gradient; of a gradient, whether there is any.
        places: for every place of the tuple the number of its tensor; ``None`` for a single tensor.
    """

    layouts: tuple[Layout, ...]
    flags: tuple[bool, ...]
    places: tuple[int, ...] | None = None

    @classmethod
    def of(cls, value: Tensors) -> Crossing:
        """The kinds of what a stage puts out.

        Args:
            value: a tensor or a tuple of tensors.
        """
        tensors = distinct(as_tuple(value))
        number = {id(tensor): i for i, tensor in enumerate(tensors)}
        return cls(
            tuple(Layout.of(tensor) for tensor in tensors),
            tuple(tensor.requires_grad for tensor in tensors),
            tuple(number[id(tensor)] for tensor in value) if isinstance(value, tuple) else None,
        )

    @classmethod
    def of_gradients(cls, gradients: Sequence[Tensor], are_there: Sequence[bool]) -> Crossing:
        """The kinds of gradients that go back.

        Args:
            gradients: one for each tensor that wants one.
            are_there: whether autograd made it; it is zeros otherwise.
        """
        return cls(tuple(map(Layout.of, gradients)), tuple(are_there), tuple(range(len(gradients))))

    def pack(self, tensors: Sequence[Tensor]) -> Tensors:
        """Put received tensors into their places.

        Args:
            tensors: one of each kind.
        """
        return tensors[0] if self.places is None else tuple(tensors[i] for i in self.places)

    def stand_in(self, device: torch.device) -> Tensors:
        """Zeros of these kinds, cut off from autograd.

        Args:
            device: where.
        """
        kinds = zip(self.layouts, self.flags, strict=True)
        return self.pack([layout.zeros(device).requires_grad_(flag) for layout, flag in kinds])

    def encode(self) -> list[int]:
        """As at most ``META_SIZE`` numbers.

        Raises:
            ValueError: if they are too many.
        """
        places = (0,) if self.places is None else self.places
        numbers, known = [int(self.places is not None), len(places)], 0
        for place in places:
            if place < known:
                numbers.append(-1 - place)
                continue
            known += 1
            layout = self.layouts[place]
            flags = _FLAGGED * self.flags[place] | _PLAIN * layout.is_plain
            numbers += [PipelineEngine.DTYPE_TO_ID[layout.dtype], flags, len(layout.shape), *layout.shape]
            numbers += [] if layout.is_plain else [layout.offset, *layout.stride]
        if len(numbers) > META_SIZE:
            raise ValueError(
                f"the {len(places)} tensors between two stages need {len(numbers)} numbers to describe, more "
                f"than {META_SIZE}; pass fewer tensors from layer to layer"
            )
        return numbers

    @classmethod
    def decode(cls, numbers: Iterable[int]) -> Crossing:
        """What :meth:`encode` wrote.

        Args:
            numbers: any may follow.
        """
        rest = iter(numbers)
        is_tuple, count = bool(next(rest)), next(rest)
        layouts: list[Layout] = []
        flags, places = [], []
        for _ in range(count):
            dtype_id = next(rest)
            if dtype_id < 0:
                places.append(-1 - dtype_id)
                continue
            places.append(len(layouts))
            marks, dim = next(rest), next(rest)
            shape = tuple(next(rest) for _ in range(dim))
            offset = 0 if marks & _PLAIN else next(rest)
            stride = contiguous_stride(shape) if marks & _PLAIN else tuple(next(rest) for _ in range(dim))
            layouts.append(Layout(shape, stride, offset, PipelineEngine.ID_TO_DTYPE[dtype_id]))
            flags.append(bool(marks & _FLAGGED))
        return cls(tuple(layouts), tuple(flags), tuple(places) if is_tuple else None)

    def describe(self, flag: str) -> list[str]:
        """A few words about each tensor.

        Args:
            flag: what to add to those that are flagged.
        """
        return [
            f"{str(layout.dtype).removeprefix('torch.')} {list(layout.shape)} with strides {list(layout.stride)}"
            + f" from element {layout.offset} of a line" * bool(layout.offset) + flag * is_flagged
            for layout, is_flagged in zip(self.layouts, self.flags, strict=True)
        ]


@dataclass
class Links:
    """What this stage and its neighbours have told each other; ``None`` where nothing yet.

    Attributes:
        inputs: told by the previous stage.
        outputs: told to the next stage.
        input_gradients: told to the previous stage.
        output_gradients: told by the next stage.
        refusals: what was of another kind than told.
    """

    inputs: Crossing | None = None
    outputs: Crossing | None = None
    input_gradients: Crossing | None = None
    output_gradients: Crossing | None = None
    refusals: list[str] = field(default_factory=list)

    def refuse(self, what: str, told: Crossing, found: Crossing, flag: str = "") -> None:
        """Note a micro-batch that can't cross.

        Args:
            what: of which it is one, for the message.
            told: the kinds before.
            found: its kinds.
            flag: what to say of flagged tensors.
        """
        pairs = list(zip_longest(told.describe(flag), found.describe(flag), fillvalue="missing"))
        before, now = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
        self.refusals.append(
            f"{what} was {before} in the first micro-batch of the batch and is {now} in a later one; build the "
            "module with dynamic_shape=True, which tells the other stage about every micro-batch"
        )
