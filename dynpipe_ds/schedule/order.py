"""An order as a value: for every stage, what it runs and in which sequence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Op(IntEnum):
    """Kinds of instructions that take time."""

    FORWARD = 0
    BACKWARD = 1
    SEND_ACTIVATION = 2
    RECV_ACTIVATION = 3
    SEND_GRADIENT = 4
    RECV_GRADIENT = 5


_LETTERS = {
    Op.FORWARD: "F", Op.BACKWARD: "B", Op.SEND_ACTIVATION: "SA", Op.RECV_ACTIVATION: "RA",
    Op.SEND_GRADIENT: "SG", Op.RECV_GRADIENT: "RG",
}  # fmt: skip
_OPS = {letters: op for op, letters in _LETTERS.items()}
_TEXT = re.compile(r"([A-Z]+)(\d+)")
_BEFORE = (  # which of two instructions of one micro-batch comes first
    (Op.RECV_ACTIVATION, Op.FORWARD), (Op.FORWARD, Op.SEND_ACTIVATION), (Op.FORWARD, Op.BACKWARD),
    (Op.RECV_GRADIENT, Op.BACKWARD), (Op.BACKWARD, Op.SEND_GRADIENT),
)  # fmt: skip


class Instruction(NamedTuple):
    """One instruction of a stage; its text is such as ``F0`` or ``RG2``.

    Attributes:
        op: what to do.
        micro_batch: with which micro-batch, counted from 0.
    """

    op: Op
    micro_batch: int

    def __str__(self) -> str:
        return f"{_LETTERS[self.op]}{self.micro_batch}"


Stream = tuple[Instruction, ...]


@dataclass(frozen=True)
class Order:
    """What every stage runs in one batch, in which sequence; alike on all ranks.

    Loading a micro-batch belongs to its forward. Reduction of gradients and the optimizer's step follow the last
    instruction and are not in it. ``str(order)`` is a text that :meth:`parse` reads back: the instructions of a stage,
    forward ``F``, backward ``B``, and ``S`` or ``R`` (send, receive) with ``A`` or ``G`` (activation, gradient), each
    with its micro-batch; stages are parted by ``|``.

    Whether the stages fit together, so that none waits for ever, is found by simulating it.

    Args:
        num_micro_batches: M.
        stages: S sequences of instructions.

    Raises:
        ValueError: when a stage's instructions are not those of its place, or one precedes what it needs.
    """

    num_micro_batches: int
    stages: tuple[Stream, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(tuple(stream) for stream in self.stages))
        if self.num_micro_batches < 1 or not self.stages:
            raise ValueError(
                f"an order of {self.num_micro_batches} micro-batches on {len(self.stages)} stages: both must be >= 1"
            )
        for stage, stream in enumerate(self.stages):
            self._check(stage, stream)

    @property
    def num_stages(self) -> int:
        """Number of stages S."""
        return len(self.stages)

    def in_flight(self, stage: int) -> int:
        """Most micro-batches that a stage holds between forward and backward.

        Args:
            stage: s.

        Returns:
            A number from 1 to M.
        """
        held = most = 0
        for op, _ in self.stages[stage]:
            held += (op is Op.FORWARD) - (op is Op.BACKWARD)
            most = max(most, held)
        return most

    def __str__(self) -> str:
        return " | ".join(" ".join(map(str, stream)) for stream in self.stages)

    @classmethod
    def parse(cls, text: str) -> Order:
        """Read the text form back.

        Args:
            text: what ``str(order)`` gave, for example ``"F0 SA0 RG0 B0 | RA0 F0 B0 SG0"``.

        Returns:
            The order that was written.

        Raises:
            ValueError: when the text is not an order.
        """
        streams = [[_instruction(word) for word in part.split()] for part in text.split("|")]
        return cls(sum(op is Op.FORWARD for op, _ in streams[0]), tuple(map(tuple, streams)))

    def _check(self, stage: int, stream: Sequence[Instruction]) -> None:
        """Each instruction of this place once, and after what it needs."""
        ops = self._ops(stage)
        wanted = {Instruction(op, m) for op in ops for m in range(self.num_micro_batches)}
        position = {instruction: i for i, instruction in enumerate(stream)}
        wrong = sorted(wanted ^ position.keys()) or [one for i, one in enumerate(stream) if position[one] != i]
        if wrong:
            raise ValueError(
                f"stage {stage} of {self.num_stages} runs {wrong[0]} {list(stream).count(wrong[0])} times; it must run "
                f"{', '.join(_LETTERS[op] for op in ops)} of each of {self.num_micro_batches} micro-batches once"
            )
        for first, second in _BEFORE:
            if first not in ops or second not in ops:
                continue
            for m in range(self.num_micro_batches):
                before, after = Instruction(first, m), Instruction(second, m)
                if position[after] < position[before]:
                    raise ValueError(f"stage {stage} of {self.num_stages} runs {after} before {before}, which it needs")

    def _ops(self, stage: int) -> list[Op]:
        ops = [Op.FORWARD, Op.BACKWARD]
        if stage < self.num_stages - 1:
            ops += [Op.SEND_ACTIVATION, Op.RECV_GRADIENT]
        if stage > 0:
            ops += [Op.RECV_ACTIVATION, Op.SEND_GRADIENT]
        return ops


def _instruction(word: str) -> Instruction:
    match = _TEXT.fullmatch(word)
    if match is None or match[1] not in _OPS:
        raise ValueError(f"{word!r} is not an instruction; one reads {', '.join(_OPS)} and a micro-batch, such as F0")
    return Instruction(_OPS[match[1]], int(match[2]))
