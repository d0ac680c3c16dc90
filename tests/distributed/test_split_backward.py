"""Orders that split the backward train the bits of 1F1B; one that leaves a part out trains nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dynpipe_ds.host import halves
from dynpipe_ds.host import order as planning
from dynpipe_ds.host.passing import BatchRefused
from dynpipe_ds.measure.recorder import WEIGHT
from dynpipe_ds.schedule import order_of
from tests.distributed.configs import ADAMW, BF16, CLIP, FP16, MOVES, ZERO
from tests.distributed.configs import BF16_FP32_SUMS as SUMS
from tests.distributed.models import Run, data, digest, make_engine, train
from tests.distributed.ranks import run_ranks
from tests.distributed.splitting import AT_THE_END, Planned, Way, compare_with_1f1b, delayed, order_for_of, train_by

IMMEDIATE = {"bf16": {"enabled": True, "immediate_grad_update": True}}
FUNCTION_MOVES = {2: (0, 1, 2, 10), 5: (0, 6, 8, 10)}
SHORT_MOVES = {2: {1: (0, 2, 8)}, 3: {1: (0, 1, 6, 8)}, 4: {1: (0, 1, 2, 6, 8)}}

TYPICAL: dict[str, tuple[Run, list[Way], int]] = {
    "fp32, clipped": (Run(2, 3, config={**ADAMW, **CLIP}, moves=SHORT_MOVES[2]), [0, "planned"], 1),
    "tied, dropout": (Run(3, 4, tied=True, dropout=0.2, config=ADAMW, moves=SHORT_MOVES[3]), [1, "planned"], 1),
    "bf16": (Run(2, 3, config={**ADAMW, **BF16}), ["planned"], 1),
    "fp16 + zero1": (Run(2, 4, config={**ADAMW, **ZERO, **FP16}), [AT_THE_END, "planned"], 1),
}

MORE: dict[str, tuple[Run, list[Way], int]] = {
    "tied": (Run(4, 6, tied=True, config=ADAMW, moves=MOVES[4]), [0, 1, 3, AT_THE_END, "planned"], 1),
    "functions": (Run(3, 6, functions=True, config=ADAMW, moves=FUNCTION_MOVES), [0, 1, 3, "planned"], 1),
    "zero1": (Run(4, 6, config={**ADAMW, **ZERO, **CLIP}, moves=MOVES[4]), [0, 3, "planned"], 1),
    "bf16": (Run(3, 6, config={**ADAMW, **BF16, **CLIP}, moves=MOVES[3]), [0, 1, AT_THE_END, "planned"], 1),
    "bf16 immediate": (Run(3, 6, config={**ADAMW, **IMMEDIATE}, moves=MOVES[3]), [0, 3, "planned"], 1),
    "bf16 + zero1": (Run(3, 6, config={**ADAMW, **BF16, **ZERO}, moves=MOVES[3]), [0, 3, "planned"], 1),
    "bf16 + zero1, fp32 sums": (Run(3, 6, config={**ADAMW, **SUMS, **CLIP}, moves=MOVES[3]), [0, 3, "planned"], 1),
    "fp16 + zero1": (Run(4, 7, config={**ADAMW, **ZERO, **FP16}, moves=MOVES[4]), [0, 1, 3, "planned"], 1),
    "zero1, two replicas": (Run(2, 5, config={**ADAMW, **ZERO}, moves=MOVES[2]), [0, 3, "planned"], 2),
    "fp32, three replicas": (Run(2, 5, dropout=0.1, config={**ADAMW, **CLIP}, moves=MOVES[2]), [1, "planned"], 3),
    "four stages": (Run(4, 6, dropout=0.2, config={**ADAMW, **CLIP}, moves=MOVES[4], micro_batches=7), ["planned"], 1),
    "bf16 + zero1, two replicas": (Run(2, 5, config={**ADAMW, **SUMS}, moves=MOVES[2]), [3, "planned"], 2),
}


def check(case: str, run: Run, ways: list[Way], replicas: int) -> None:
    for plain in compare_with_1f1b(run, ways, replicas):
        assert (0 < plain.num_skipped < run.num_batches) == ("fp16" in case), "its scale overflows in some batches"


@pytest.mark.parametrize("case", TYPICAL)
def test_the_bits_are_those_of_1f1b(case: str) -> None:
    run, ways, replicas = TYPICAL[case]
    check(case, run, ways, replicas)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE)
def test_the_bits_are_those_of_1f1b_in_more_configurations(case: str) -> None:
    run, ways, replicas = MORE[case]
    check(case, run, ways, replicas)


@pytest.mark.exhaustive
@pytest.mark.parametrize("interval", [1, 2])
def test_recomputed_layers_run_whole(interval: int) -> None:
    run = Run(3, 5, checkpoint_interval=interval, config=ADAMW, moves=MOVES[3])
    compare_with_1f1b(run, [0, 3, "planned"], splits=False)


def change_orders(_rank: int, run: Run) -> tuple[Any, Any, list[Any]]:
    """1F1B, and another order in every batch, with evaluations, moves and other batch sizes in between."""
    orders = [
        delayed(2), planning.ONE_F_ONE_B, Planned(1), lambda m, s: order_of("gpipe", m, s), delayed(0), Planned(2),
        delayed(AT_THE_END),
    ]  # fmt: skip
    evaluated: list[Any] = []

    def life(engine: Any, batch: int) -> None:
        if batch in (3, 6):
            engine.set_train_batch_size(2 * (6 if batch == 3 else 3))
        if batch in (2, 4):
            evaluated.append(float(engine.eval_batch(data(0, run.micro_batches))))
        if batch == 5:
            loss, logits = engine.eval_batch(data(0, 3), return_logits=True, num_micro_batches=3)
            evaluated.append((float(loss), logits is None))

    def by_turns(engine: Any, batch: int) -> None:
        life(engine, batch)
        engine.dynamic.pipeline.order_for = orders[batch % len(orders)]

    return train_by(run, planning.ONE_F_ONE_B, life), train_by(run, None, by_turns), evaluated


def test_another_order_in_every_batch() -> None:
    run = Run(2, 8, dropout=0.1, config={**ADAMW, **CLIP}, moves={4: (0, 2, 8)})
    for plain, by_turns, evaluated in run_ranks(change_orders, 2, run):
        assert by_turns.bits == plain.bits
        assert len(evaluated) == 6 and evaluated[:3] == evaluated[3:]
    assert by_turns.num_split > 12, "the last stage split"


class LeavingOut(planning.OrderSchedule):
    """Leaves out a stage's last W, or all of its last backward."""

    stage, kinds = 1, (planning.BackwardWeight,)

    def steps(self) -> Iterator[list[Any]]:
        """As it should be, but for an instruction or two."""
        steps = list(super().steps())
        for kind in self.kinds if self.stage_id == self.stage else ():
            [step for step in steps if step and type(step[-1]) is kind][-1].pop()
        yield from steps


@contextmanager
def leaving_out(stage: int, *kinds: type) -> Iterator[None]:
    """Inside, a stage does not run its last instructions of some kinds."""
    with patch.object(planning, "OrderSchedule", LeavingOut), patch.multiple(LeavingOut, stage=stage, kinds=kinds):
        yield


@contextmanager
def adding_nothing(stage: int) -> Iterator[None]:
    """Inside, the second half of a stage's backward does not reach the parameters."""
    run = halves.ParameterHalf.run

    def run_and_forget(half: Any, *args: Any) -> frozenset[Any]:
        parameters = run(half, *args)
        return frozenset() if torch.distributed.get_rank() == stage else parameters

    with patch.object(halves.ParameterHalf, "run", run_and_forget):
        yield


LEFT_OUT: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "stage 1: 0 forwards were left without a backward, 1 backwards without their second half (W), and": (
        lambda: leaving_out(1, planning.BackwardWeight)
    ),
    "stage 2: 1 forwards were left without a backward, 0 backwards without their second half (W), and 0 parameters": (
        lambda: leaving_out(2, planning.BackwardInput, planning.BackwardWeight)
    ),
    "stage 0: 0 forwards were left without a backward, 1 backwards without their second half (W), and 0 parameters": (
        lambda: leaving_out(0, planning.BackwardWeight)
    ),
    "stage 2: 0 forwards were left without a backward, 0 backwards without their second half (W), and 8 parameters": (
        lambda: adding_nothing(2)
    ),
}


def weights_of(engine: Any) -> list[float]:
    return [float(parameter.double().sum()) for parameter in engine.module.parameters()]


def leave_out(_rank: int, run: Run, cases: list[str]) -> list[tuple[str, bool]]:
    found = []
    for case in cases:
        engine = make_engine(run)
        engine.dynamic.pipeline.order_for = delayed(1)
        before = weights_of(engine)
        with LEFT_OUT[case](), pytest.raises(BatchRefused) as refused:
            train(engine, run)
        stays = weights_of(engine) == before
        train(engine, run)
        found.append((str(refused.value), stays and weights_of(engine) != before))
    return found


def test_no_rank_steps_without_a_part_of_a_backward() -> None:
    """All ranks refuse the batch alike, no weight has changed, and training can go on."""
    alone = next(case for case in LEFT_OUT if case.startswith("stage 0"))
    ranks = run_ranks(leave_out, 3, Run(3, 2, config=ADAMW), list(LEFT_OUT))
    for case, (message, went_on) in [
        *(pair for rank in ranks for pair in zip(LEFT_OUT, rank, strict=True)),
        (alone, run_ranks(leave_out, 1, Run(1, 2, config=ADAMW), [alone])[0][0]),
    ]:
        assert case in message and went_on


FIRST, SAVED, OTHER = (0, 3, 5, 8), (0, 1, 6, 8), (0, 2, 4, 8)
SAVED_AFTER = 2


def resume(_rank: int, run: Run, folder: str, before: Way, after: Way) -> tuple[Any, Any]:
    """A run in one order that saves on the way; another one, elsewhere cut, goes on from there in another order."""

    def halfway(engine: Any, batch: int) -> None:
        if batch == SAVED_AFTER:
            engine.save_checkpoint(folder)

    whole = train_by(replace(run, moves={1: SAVED, 4: OTHER}), order_for_of(before), halfway)
    engine = make_engine(replace(run, first=OTHER))
    engine.dynamic.pipeline.order_for = order_for_of(after)
    engine.load_checkpoint(folder)
    batches = data(0, run.micro_batches)
    for _ in range(SAVED_AFTER * run.micro_batches):
        next(batches)
    losses = []
    for batch in range(SAVED_AFTER, run.num_batches):
        if batch == SAVED_AFTER + 1:
            engine.repartition(OTHER)
        losses.append(float(engine.train_batch(batches)))
    return (whole.losses[SAVED_AFTER:], whole.digest), (losses, digest(engine))


@pytest.mark.parametrize(
    ("config", "before", "after"),
    [
        pytest.param(ADAMW, "planned", None, id="fp32, from planned to 1f1b"),
        pytest.param({**ADAMW, **CLIP}, None, "planned", id="fp32, to planned", marks=pytest.mark.exhaustive),
        pytest.param({**ADAMW, **SUMS}, "planned", None, id="bf16, from planned", marks=pytest.mark.exhaustive),
        pytest.param({**ADAMW, **SUMS}, None, "planned", id="bf16, to planned", marks=pytest.mark.exhaustive),
        pytest.param({**ADAMW, **ZERO, **FP16}, 3, "planned", id="fp16", marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_is_resumed_in_another_order_and_cut(config: Any, before: Way, after: Way, tmp_path: Any) -> None:
    run = Run(3, 6, dropout=0.1, config=config, first=FIRST)
    for whole, resumed in run_ranks(resume, 3, run, str(tmp_path), before, after):
        assert resumed == whole


def record(_rank: int, run: Run) -> tuple[set[int], list[int], int]:
    """Layers whose weights were computed apart in the last batch, layers with a backward, micro-batches of the last."""
    engine = make_engine(run)
    engine.dynamic.pipeline.order_for = delayed(2)
    train(engine, run)
    recorder = engine.dynamic.profiler.recorder
    computed = {layer for kind, layer, _ in recorder.marks if kind == WEIGHT}
    seconds = recorder.by_micro_batch()
    assert sum(kind == WEIGHT and layer == 7 for kind, layer, _ in recorder.marks) >= run.micro_batches or _rank == 0
    return computed, sorted(seconds), min(len(backward) for _, backward in seconds.values())


def test_the_second_half_is_recorded_by_layer() -> None:
    config = {**ADAMW, "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"}}
    first, last = run_ranks(record, 2, Run(2, 2, config=config))
    assert last == ({4, 5, 6, 7}, [4, 5, 6, 7], 4)
    assert first[0] == {0, 1, 2, 3}, "the first stage's whole backward runs there"
