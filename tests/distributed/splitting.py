"""Training by orders that split the backward, and the same by 1F1B."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from dynpipe_ds.host import halves
from dynpipe_ds.schedule import Instruction, Op, Order, order_of
from tests.distributed.configs import BY_HAND
from tests.distributed.models import Run, digest, make_engine, train
from tests.distributed.ranks import run_ranks

AT_THE_END = 10**6
OrderFor = Callable[[int, int], Order]


def delayed(delay: int) -> OrderFor:
    """1F1B with every backward split, its second half by some micro-batches later than the first."""

    def order_for(num_micro_batches: int, num_stages: int) -> Order:
        order = order_of("1f1b", num_micro_batches, num_stages)
        return Order(num_micro_batches, tuple(tuple(_later(stream, delay)) for stream in order.stages))

    return order_for


def _later(stream: tuple[Instruction, ...], delay: int) -> list[Instruction]:
    found: list[Instruction] = []
    waiting: list[int] = []
    for instruction in stream:
        found.append(instruction)
        if instruction.op is Op.BACKWARD:
            waiting.append(instruction.micro_batch)
            while len(waiting) > delay:
                found.append(Instruction(Op.BACKWARD_WEIGHT, waiting.pop(0)))
    return found + [Instruction(Op.BACKWARD_WEIGHT, micro_batch) for micro_batch in waiting]


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one run; the number of backwards that were split is no part of its bits."""

    losses: list[float]
    digest: dict[str, str]
    norms: list[float]
    num_split: int

    @property
    def bits(self) -> Any:
        return self.losses, self.digest, self.norms


@contextmanager
def counting_splits() -> Any:
    """Inside, count backwards that are split."""
    split: list[int] = []

    def counted(*args: Any) -> Any:
        half = ORIGINAL(*args)
        split.append(1)
        return half

    with patch.object(halves, "backward_inputs", counted):
        yield split


ORIGINAL = halves.backward_inputs


def by_1f1b(run: Run) -> Run:
    """The same without the batches that split backwards to measure them."""
    section = run.config.get("dynamic_pipeline", BY_HAND)
    return replace(run, config={**run.config, "dynamic_pipeline": {**section, "schedule": "1f1b"}})


def train_by(run: Run, order_for: OrderFor | None, on_batch: Callable[[Any, int], None] | None = None) -> Seen:
    norms: list[float] = []

    def before(engine: Any, batch: int) -> None:
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        if on_batch is not None:
            on_batch(engine, batch)

    with counting_splits() as split:
        engine = make_engine(run if order_for is not None else by_1f1b(run))
        if order_for is not None:
            engine.dynamic.pipeline.order_for = order_for
        losses = train(engine, run, before)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        return Seen(losses, digest(engine), norms, len(split))


def train_each_way(_rank: int, run: Run, delays: list[int | None]) -> list[Seen]:
    return [train_by(run, None if delay is None else delayed(delay)) for delay in delays]


def compare_with_1f1b(run: Run, delays: list[int], replicas: int = 1, *, splits: bool = True) -> None:
    """Train by 1F1B and with each delay; bits must agree, and all stages but the first must have split."""
    ranks = run_ranks(train_each_way, run.num_stages * replicas, run, [None, *delays], timeout_s=150)
    for rank, (plain, *others) in enumerate(ranks):
        assert plain.num_split == 0 and all(loss == loss for loss in plain.losses)
        for delay, other in zip(delays, others, strict=True):
            assert other.bits == plain.bits, f"rank {rank}, W delayed by {delay}"
            most = run.num_batches * run.micro_batches if splits and rank >= replicas else 0
            # One whose activations are counted, the first and after each move, runs whole.
            least = most and most - 1 - len(run.moves)
            assert least <= other.num_split <= most, f"rank {rank}, W delayed by {delay}"
