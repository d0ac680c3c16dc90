"""What crosses the boundary between two stages: told in a message before it, and the same until told anew.

The sender tells it before the first micro-batch of a batch, or before each one where the module has
``dynamic_shape=True``, and where what it told can't hold for the next one: numbers and texts may be others there. A
micro-batch that is of another kind than told can't be received: zeros travel in its place, which keep all ranks in
step. Where nothing at all can be sent, that is told, and the later stages leave the micro-batch out. In both cases all
ranks refuse the batch before the optimizer's step.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dynpipe_ds.messages.layouts import Layout, contiguous_stride
from dynpipe_ds.messages.traffic import Kind, Message
from dynpipe_ds.messages.values import (
    Structure,
    dtype_name,
    dtype_of,
    holds_plain_values,
    put_together,
    shown,
    take_apart,
)

FIRST_BYTES = 2048
"""Size of the message that tells; a longer description takes a second one."""

_WANTING = " that wants a gradient"


@dataclass(frozen=True)
class Crossing:
    """A micro-batch's value, as kinds.

    A tensor that a value holds twice travels once, and is one tensor on the other side, too: its gradients are then
    added in the order of the undivided model.

    Attributes:
        layouts: of each tensor.
        flags: of an activation, whether it wants a gradient; of a gradient, whether there is any.
        structure: where the tensors belong, and the plain values.
        again: whether the next micro-batch is told about, too, since it may differ without being of another kind.
    """

    layouts: tuple[Layout, ...]
    flags: tuple[bool, ...]
    structure: Structure = None
    again: bool = field(default=False, compare=False)

    @classmethod
    def of(cls, value: Any, *, may_want: bool = False) -> tuple[Crossing, list[Tensor]]:
        """The kinds of what a stage puts out, and its distinct tensors.

        Args:
            value: what the last layer returned.
            may_want: whether the stage has anything to train: if no tensor of this micro-batch wants a gradient, since
                layers were skipped, one of the next may.

        Raises:
            CantCross: if something in it can't be sent.
        """
        structure, tensors = take_apart(value)
        flags = tuple(tensor.requires_grad for tensor in tensors)
        again = holds_plain_values(structure) or (may_want and not any(flags))
        return cls(tuple(map(Layout.of, tensors)), flags, structure, again), tensors

    @classmethod
    def of_gradients(cls, gradients: Sequence[Tensor], are_there: Sequence[bool]) -> Crossing:
        """The kinds of gradients that go back, some of them zeros where autograd made none."""
        return cls(tuple(map(Layout.of, gradients)), tuple(are_there))

    def covers(self, found: Crossing) -> bool:
        """Whether a micro-batch can be received as one of this kind.

        It can where fewer tensors want a gradient: what comes back for the others is left out.
        """
        if (self.layouts, self.structure) != (found.layouts, found.structure):
            return False
        return all(told or not wants for told, wants in zip(self.flags, found.flags, strict=True))

    def wanting(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those of a micro-batch's tensors for which gradients come back."""
        return [tensor for tensor, flag in zip(tensors, self.flags, strict=True) if flag]

    def zeros(self, device: torch.device) -> list[Tensor]:
        """Tensors of zeros of these kinds, cut off from autograd."""
        kinds = zip(self.layouts, self.flags, strict=True)
        return [layout.zeros(device).requires_grad_(flag) for layout, flag in kinds]

    def pack(self, tensors: Sequence[Tensor]) -> Any:
        """Put received tensors into their places.

        Raises:
            LookupError: if a named tuple in it is of a class that this process does not know.
        """
        return put_together(self.structure, tensors)

    def encode(self) -> bytes:
        """As text that :meth:`decode` reads."""
        tensors = [
            [dtype_name(layout.dtype), flag, layout.shape, *(() if layout.is_plain else (layout.offset, layout.stride))]
            for layout, flag in zip(self.layouts, self.flags, strict=True)
        ]
        return json.dumps([tensors, self.structure, self.again], separators=(",", ":")).encode()

    @classmethod
    def decode(cls, text: bytes) -> Crossing:
        """What :meth:`encode` wrote."""
        tensors, structure, again = _frozen(json.loads(text))
        layouts = []
        for name, _, shape, *rest in tensors:
            offset, stride = rest or (0, contiguous_stride(shape))
            layouts.append(Layout(shape, stride, offset, dtype_of(name)))
        return cls(tuple(layouts), tuple(flag for _, flag, *_ in tensors), structure, again)

    def describe(self, flag: str = _WANTING) -> list[str]:
        """A few words about each tensor."""
        return [
            f"{dtype_name(layout.dtype)} {list(layout.shape)} with strides {list(layout.stride)}"
            + f" from element {layout.offset} of a line" * bool(layout.offset) + flag * is_flagged
            for layout, is_flagged in zip(self.layouts, self.flags, strict=True)
        ]


class Told(NamedTuple):
    """What is told before a message.

    Attributes:
        crossing: the kinds of its tensors; ``None``: nothing can be sent.
    """

    crossing: Crossing | None


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@dataclass(frozen=True)
class Passage:
    """A micro-batch that has crossed, until its gradients have.

    Attributes:
        wanting: its tensors for which gradients go back, some of which may not want one after all.
        is_told: whether it was told about; its gradients are then, too.
    """

    wanting: Sequence[Tensor] = ()
    is_told: bool = True


class Awaited(NamedTuple):
    """A gradient that may come back; without the tensors, which must not be kept for it.

    Attributes:
        comes: whether any tensor wanted one.
        is_told: whether it is told about.
    """

    comes: bool
    is_told: bool


@dataclass
class Links:
    """What this stage and its neighbours have told each other in a batch; ``None`` where nothing yet.

    Attributes:
        inputs: told by the previous stage.
        outputs: told to the next stage.
        input_gradients: told to the previous stage.
        output_gradients: told by the next stage.
        received: from the previous stage, by buffer.
        sent: to the next stage, by buffer.
        awaited: what comes back for what was sent to the next stage, by micro-batch.
        failure: what first kept this rank from going on with this batch.
        always_told: whether every micro-batch is told about.
        is_settled: whether all ranks have agreed that no rank refuses the batch.
    """

    inputs: Crossing | None = None
    outputs: Crossing | None = None
    input_gradients: Crossing | None = None
    output_gradients: Crossing | None = None
    received: dict[int, Passage] = field(default_factory=dict)
    sent: dict[int, Passage] = field(default_factory=dict)
    awaited: dict[int, Awaited] = field(default_factory=dict)
    failure: Exception | None = None
    always_told: bool = False
    is_settled: bool = False

    def tells(self, last: Crossing | None) -> bool:
        """Whether the next micro-batch is told about.

        Args:
            last: what was told last, in the same direction.
        """
        return last is None or last.again or self.always_told

    # -- what comes, for those who receive ahead --------------------------------------------------

    def is_known(self, message: Message) -> bool:
        """Whether it can be said yet if a message travels, and as what: a gradient's activation must have gone."""
        return message.kind is Kind.ACTIVATION or message.micro_batch in self.awaited

    def travels(self, message: Message) -> bool:
        """Whether a message is sent at all: where no gradient is wanted, none is."""
        return message.kind is Kind.ACTIVATION or self.awaited[message.micro_batch].comes

    def crossing(self, message: Message) -> Crossing | None:
        """The kinds of a message that travels; ``None`` where they are told before it."""
        if message.kind is Kind.ACTIVATION:
            return None if self.tells(self.inputs) else self.inputs
        return None if self.awaited[message.micro_batch].is_told else self.output_gradients

    def heard(self, message: Message, crossing: Crossing | None) -> None:
        """Take note of what was told before a message."""
        if message.kind is Kind.ACTIVATION:
            self.inputs = crossing
        else:
            self.output_gradients = crossing

    @staticmethod
    def difference(what: str, told: Crossing, found: Crossing, flag: str = _WANTING) -> ValueError:
        """Why a micro-batch that is of another kind than told can't be sent.

        Args:
            what: of which it is one, for the message.
            told: the kinds before.
            found: its kinds.
            flag: what to say of flagged tensors.
        """
        before, now = shown(told.structure), shown(found.structure)
        if before == now:
            pairs = list(zip(told.describe(flag), found.describe(flag), strict=True))
            before, now = next((pair for pair in pairs if pair[0] != pair[1]), pairs[0])
        return ValueError(
            f"{what} was {before} in the first micro-batch of the batch and is {now} in a later one; build the "
            "module with dynamic_shape=True, which tells the other stage about every micro-batch"
        )
