"""Training by orders that split the backward, and the same by 1F1B."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np

from dynpipe_ds.host import halves
from dynpipe_ds.host.order import ONE_F_ONE_B, OrderFor
from dynpipe_ds.planning import plan_order
from dynpipe_ds.schedule import Instruction, Op, Order, order_of
from dynpipe_ds.simulation import Workload
from tests.distributed.models import Run, digest, make_engine, train
from tests.distributed.ranks import run_ranks

AT_THE_END = 10**6


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


class Planned:
    """Plans another order for every batch, of seconds that are drawn anew; alike on all ranks.

    Args:
        seed: of the seconds.
    """

    def __init__(self, seed: int = 0) -> None:
        self._draw = np.random.default_rng(seed)
        self.orders: list[Order] = []

    def __call__(self, num_micro_batches: int, num_stages: int) -> Order:
        """The next batch's order."""
        draw, shape = self._draw, (num_stages, num_micro_batches)
        backward_s = draw.uniform(1, 4, shape)
        workload = Workload(
            draw.uniform(0.5, 2, shape), backward_s, num_micro_batches,
            weight_s=backward_s * draw.uniform(0.2, 0.6, shape), activation_bytes=(1,) * num_stages,
        )  # fmt: skip
        order = plan_order(workload, int(draw.integers(1, num_micro_batches + 2))).order
        late = () if draw.random() < 0.5 else tuple(map(int, draw.integers(0, 4, num_stages)))
        self.orders.append(replace(order, late=late))
        return self.orders[-1]


Way = int | str | None
"""1F1B (``None``), each W so many micro-batches after its B, or ``"planned"``: another order in every batch."""


def order_for_of(way: Way) -> OrderFor:
    return ONE_F_ONE_B if way is None else Planned() if isinstance(way, str) else delayed(way)


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one run; the number of backwards that were split is no part of its bits."""

    losses: list[float]
    digest: dict[str, str]
    norms: list[float]
    num_skipped: int
    num_split: int

    @property
    def bits(self) -> Any:
        return self.losses, self.digest, self.norms, self.num_skipped


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


def train_by(run: Run, order_for: OrderFor, on_batch: Callable[[Any, int], None] | None = None) -> Seen:
    norms: list[float] = []

    def before(engine: Any, batch: int) -> None:
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        if on_batch is not None:
            on_batch(engine, batch)

    with counting_splits() as split:
        engine = make_engine(run)
        engine.dynamic.pipeline.order_for = order_for
        losses = train(engine, run, before)
        norms.append(float(engine.get_global_grad_norm() or 0.0))
        return Seen(losses, digest(engine), norms, engine.skipped_steps, len(split))


def train_each_way(_rank: int, run: Run, ways: list[Way]) -> list[Seen]:
    return [train_by(run, order_for_of(way)) for way in ways]


def compare_with_1f1b(run: Run, ways: list[Way], replicas: int = 1, *, splits: bool = True) -> list[Seen]:
    """Train by 1F1B and in each way; bits must agree, and all stages but the first must have split.

    Returns:
        What ranks saw of 1F1B.
    """
    ranks = run_ranks(train_each_way, run.num_stages * replicas, run, [None, *ways], timeout_s=150)
    for rank, (plain, *others) in enumerate(ranks):
        assert plain.num_split == 0 and all(loss == loss for loss in plain.losses)
        for way, other in zip(ways, others, strict=True):
            assert other.bits == plain.bits, f"rank {rank}, W: {way}"
            most = run.num_batches * run.micro_batches if splits and rank >= replicas else 0
            # One whose activations are counted, the first and after each move, runs whole; a plan need not split all.
            least = most and (1 if way == "planned" else most - 1 - len(run.moves))
            assert least <= other.num_split <= most, f"rank {rank}, W: {way}"
    return [plain for plain, *_ in ranks]
