"""An order as a value: for every stage, what it runs and in which sequence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple


class Op(IntEnum):
    """Kinds of instructions that take time."""

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_WEIGHT = 2
    SEND_ACTIVATION = 3
    RECV_ACTIVATION = 4
    SEND_GRADIENT = 5
    RECV_GRADIENT = 6


_LETTERS = {
    Op.FORWARD: "F", Op.BACKWARD: "B", Op.BACKWARD_WEIGHT: "W", Op.SEND_ACTIVATION: "SA", Op.RECV_ACTIVATION: "RA",
    Op.SEND_GRADIENT: "SG", Op.RECV_GRADIENT: "RG",
}  # fmt: skip
_OPS = {letters: op for op, letters in _LETTERS.items()}
_TEXT = re.compile(r"([A-Z]+)(\d+)")
_BEFORE = (  # which of two instructions of one micro-batch comes first
    (Op.RECV_ACTIVATION, Op.FORWARD), (Op.FORWARD, Op.SEND_ACTIVATION), (Op.FORWARD, Op.BACKWARD),
    (Op.RECV_GRADIENT, Op.BACKWARD), (Op.BACKWARD, Op.SEND_GRADIENT), (Op.BACKWARD, Op.BACKWARD_WEIGHT),
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
    forward ``F``, backward ``B`` and ``W``, and ``S`` or ``R`` (send, receive) with ``A`` or ``G`` (activation,
    gradient), each with its micro-batch; stages are parted by ``|``, and ``late`` follows ``@``, if it is given.

    A stage may split the backward of some micro-batches: ``B`` then computes the gradients of its inputs only, and a
    later ``W`` those of its weights. A ``B`` without ``W`` is the whole backward. In a stage that splits, gradients of
    weights are added up in the order of micro-batches, so that the sums keep their bits.

    Whether the stages fit together, so that none waits for ever, is found by simulating it.

    Args:
        num_micro_batches: M.
        stages: S sequences of instructions.
        late: for each stage, of how many of its layers, from the first one on, ``W`` computes the gradients of weights.
            The others' are computed in ``B``, right after those of the inputs, and so hold nothing until ``W``. Empty:
            of all layers.

    Raises:
        ValueError: when a stage's instructions are not those of its place, or one precedes what it needs, or ``late``
            has not S numbers.
    """

    num_micro_batches: int
    stages: tuple[Stream, ...]
    late: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(tuple(stream) for stream in self.stages))
        object.__setattr__(self, "late", tuple(self.late))
        if self.late and (len(self.late) != len(self.stages) or min(self.late) < 0):
            raise ValueError(f"late = {self.late}: need a number of layers >= 0 for each of {len(self.stages)} stages")
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
        """Most micro-batches that a stage holds between forward and the end of their backward, ``W`` if it is split.

        Args:
            stage: s.

        Returns:
            A number from 1 to M.
        """
        held = most = 0
        split = self.split(stage)
        for op, micro_batch in self.stages[stage]:
            held += (op is Op.FORWARD) - _ends_backward(op, micro_batch, split)
            most = max(most, held)
        return most

    def split(self, stage: int) -> frozenset[int]:
        """The micro-batches whose backward a stage splits, that is, which have a ``W``.

        Args:
            stage: s.

        Returns:
            Numbers from 0 to M - 1; none for a stage that splits nothing.
        """
        return self._split[stage]

    @cached_property
    def _split(self) -> list[frozenset[int]]:
        return [frozenset(m for op, m in stream if op is Op.BACKWARD_WEIGHT) for stream in self.stages]

    def may_wait(self, layer_stages: Sequence[int]) -> list[bool]:
        """Which layers' weight gradients are among those that ``W`` computes, where a stage splits a backward.

        Args:
            layer_stages: of each of L layers its stage.

        Returns:
            L truth values.
        """
        return waiting_layers(self.late, layer_stages)

    def __str__(self) -> str:
        streams = " | ".join(" ".join(map(str, stream)) for stream in self.stages)
        return f"{streams} @ {' '.join(map(str, self.late))}" if self.late else streams

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
        text, _, late = text.partition("@")
        streams = [[_instruction(word) for word in part.split()] for part in text.split("|")]
        num_micro_batches = sum(op is Op.FORWARD for op, _ in streams[0])
        return cls(num_micro_batches, tuple(map(tuple, streams)), tuple(map(int, late.split())))

    def _check(self, stage: int, stream: Sequence[Instruction]) -> None:
        """Each instruction of this place once, and after what it needs."""
        ops = self._ops(stage)
        positions: list[dict[int, int]] = [{} for _ in Op]  # by op and micro-batch; the first, if it is there twice
        for i, (op, micro_batch) in enumerate(stream):
            positions[op].setdefault(micro_batch, i)
        if wrong := self._wrong(ops, stream, positions):
            raise ValueError(
                f"stage {stage} of {self.num_stages} runs {wrong} {list(stream).count(wrong)} times; it must run "
                f"{', '.join(_LETTERS[op] for op in ops)} of each of {self.num_micro_batches} micro-batches once"
            )
        for first, second in _BEFORE:
            before, after = positions[first], positions[second]
            if late := [m for m in before.keys() & after.keys() if after[m] < before[m]]:
                raise ValueError(
                    f"stage {stage} of {self.num_stages} runs {Instruction(second, min(late))} before "
                    f"{Instruction(first, min(late))}, which it needs"
                )
        self._check_sums(stage)

    def _wrong(
        self, ops: Sequence[Op], stream: Sequence[Instruction], positions: Sequence[dict[int, int]]
    ) -> Instruction | None:
        """An instruction that is missing, there twice, or not of this place."""
        all_of_them = set(range(self.num_micro_batches))
        for op, found in zip(Op, positions, strict=True):
            wanted = all_of_them if op in ops else set()
            if op is Op.BACKWARD_WEIGHT:  # a stage may split the backward of any
                wanted = all_of_them & found.keys()
            if odd := wanted ^ found.keys():
                return Instruction(op, min(odd))
        if len(stream) == sum(map(len, positions)):
            return None
        return next(one for i, one in enumerate(stream) if positions[one.op][one.micro_batch] != i)

    def _check_sums(self, stage: int) -> None:
        """Gradients of weights in the order of micro-batches, where some are computed apart."""
        if not (split := self.split(stage)):
            return
        whole, weight = Op.BACKWARD, Op.BACKWARD_WEIGHT
        adding = [one for one in self.stages[stage] if one[0] is weight or (one[0] is whole and one[1] not in split)]
        for first, second in pairwise(adding):
            if second[1] < first[1]:
                raise ValueError(
                    f"stage {stage} of {self.num_stages} runs {first} before {second}: gradients of weights must be "
                    "added up in the order of micro-batches, or the sums round differently"
                )

    def _ops(self, stage: int) -> list[Op]:
        ops = [Op.FORWARD, Op.BACKWARD]
        if stage < self.num_stages - 1:
            ops += [Op.SEND_ACTIVATION, Op.RECV_GRADIENT]
        if stage > 0:
            ops += [Op.RECV_ACTIVATION, Op.SEND_GRADIENT]
        return ops


def waiting_layers(late: Sequence[int], layer_stages: Sequence[int]) -> list[bool]:
    """Of each layer whether it is among the first ones of its stage.

    Args:
        late: S numbers of layers; empty: all.
        layer_stages: of each of L layers its stage, layers of a stage in a row.
    """
    if not late:
        return [True] * len(layer_stages)
    first = {stage: layer_stages.index(stage) for stage in set(layer_stages)}
    return [i - first[stage] < late[stage] for i, stage in enumerate(layer_stages)]


def _ends_backward(op: Op, micro_batch: int, split: frozenset[int]) -> bool:
    """Whether nothing of a micro-batch's backward remains after this instruction."""
    return op is Op.BACKWARD_WEIGHT or (op is Op.BACKWARD and micro_batch not in split)


def _instruction(word: str) -> Instruction:
    match = _TEXT.fullmatch(word)
    if match is None or match[1] not in _OPS:
        raise ValueError(f"{word!r} is not an instruction; one reads {', '.join(_OPS)} and a micro-batch, such as F0")
    return Instruction(_OPS[match[1]], int(match[2]))
