"""Orders that split the backward train the bits of 1F1B; one that leaves a part out trains nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from dynpipe_ds.host import order as planning
from dynpipe_ds.host.passing import BatchRefused
from dynpipe_ds.measure.recorder import WEIGHT
from dynpipe_ds.schedule import order_of
from tests.distributed.configs import ADAMW, BF16, BF16_FP32_SUMS, CLIP, FP16, MOVES, ZERO
from tests.distributed.models import Run, data, digest, make_engine, train
from tests.distributed.ranks import run_ranks
from tests.distributed.splitting import AT_THE_END, compare_with_1f1b, delayed, train_by

IMMEDIATE = {"bf16": {"enabled": True, "immediate_grad_update": True}}
SHORT_MOVES = {2: {1: (0, 2, 8)}, 3: {1: (0, 1, 6, 8)}, 4: {1: (0, 1, 2, 6, 8)}}

TYPICAL: dict[str, tuple[Run, list[int], int]] = {
    "fp32, clipped": (Run(2, 3, config={**ADAMW, **CLIP}, moves=SHORT_MOVES[2]), [0, 3], 1),
    "tied, dropout": (Run(3, 3, tied=True, dropout=0.2, config=ADAMW, moves=SHORT_MOVES[3]), [1], 1),
    "bf16": (Run(2, 3, config={**ADAMW, **BF16}), [3], 1),
    "fp16 + zero1": (Run(2, 4, config={**ADAMW, **ZERO, **FP16}), [AT_THE_END], 1),
}

MORE: dict[str, tuple[Run, list[int], int]] = {
    "tied": (Run(4, 6, tied=True, config=ADAMW, moves=MOVES[4]), [0, 1, 3, AT_THE_END], 1),
    "functions": (Run(3, 6, functions=True, config=ADAMW, moves={2: (0, 1, 2, 10), 5: (0, 6, 8, 10)}), [0, 1, 3], 1),
    "zero1": (Run(4, 6, config={**ADAMW, **ZERO, **CLIP}, moves=MOVES[4]), [0, 3], 1),
    "bf16": (Run(3, 6, config={**ADAMW, **BF16, **CLIP}, moves=MOVES[3]), [0, 1, AT_THE_END], 1),
    "bf16 immediate": (Run(3, 6, config={**ADAMW, **IMMEDIATE}, moves=MOVES[3]), [0, 3], 1),
    "bf16 + zero1": (Run(3, 6, config={**ADAMW, **BF16, **ZERO}, moves=MOVES[3]), [0, 3], 1),
    "bf16 + zero1, fp32 sums": (Run(3, 6, config={**ADAMW, **BF16_FP32_SUMS, **CLIP}, moves=MOVES[3]), [0, 3], 1),
    "fp16 + zero1": (Run(4, 7, config={**ADAMW, **ZERO, **FP16}, moves=MOVES[4]), [0, 1, 3], 1),
    "zero1, two replicas": (Run(2, 5, config={**ADAMW, **ZERO}, moves=MOVES[2]), [0, 3], 2),
    "fp32, three replicas": (Run(2, 5, dropout=0.1, config={**ADAMW, **CLIP}, moves=MOVES[2]), [1, AT_THE_END], 3),
    "bf16 + zero1, two replicas": (Run(2, 5, config={**ADAMW, **BF16_FP32_SUMS}, moves=MOVES[2]), [3], 2),
}


@pytest.mark.parametrize("case", TYPICAL)
def test_the_bits_are_those_of_1f1b(case: str) -> None:
    run, delays, replicas = TYPICAL[case]
    compare_with_1f1b(run, delays, replicas)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE)
def test_the_bits_are_those_of_1f1b_in_more_configurations(case: str) -> None:
    run, delays, replicas = MORE[case]
    compare_with_1f1b(run, delays, replicas)


@pytest.mark.exhaustive
@pytest.mark.parametrize("interval", [1, 2])
def test_recomputed_layers_run_whole(interval: int) -> None:
    compare_with_1f1b(Run(3, 5, checkpoint_interval=interval, config=ADAMW, moves=MOVES[3]), [0, 3], splits=False)


def change_orders(_rank: int, run: Run) -> tuple[Any, Any]:
    """1F1B, and another order in every batch, which is evaluated in between and of another size once."""
    orders = [delayed(2), planning.ONE_F_ONE_B, lambda m, s: order_of("gpipe", m, s), delayed(0), delayed(AT_THE_END)]

    def life(engine: Any, batch: int) -> None:
        if batch == 3:
            engine.set_train_batch_size(2 * 6)
        if batch == 4:
            engine.eval_batch(data(0, run.micro_batches))

    def by_turns(engine: Any, batch: int) -> None:
        life(engine, batch)
        engine.dynamic.pipeline.order_for = orders[batch % len(orders)]

    return train_by(run, None, life), train_by(run, None, by_turns)


def test_another_order_in_every_batch() -> None:
    for plain, by_turns in run_ranks(change_orders, 2, Run(2, 6, dropout=0.1, config={**ADAMW, **CLIP})):
        assert by_turns.bits == plain.bits
    assert by_turns.num_split > 8, "the last stage split"


class LeavingOut(planning.OrderSchedule):
    """Leaves out a stage's last W."""

    def steps(self) -> Iterator[list[Any]]:
        """As it should be, but for one instruction."""
        steps = list(super().steps())
        weights = [step for step in steps if type(step[-1]) is planning.BackwardWeight]
        if self.stage_id == 1:
            weights[-1].pop()
        yield from steps


def weights_of(engine: Any) -> list[float]:
    return [float(parameter.double().sum()) for parameter in engine.module.parameters()]


def leave_out(_rank: int, run: Run) -> tuple[str, bool]:
    engine = make_engine(run)
    engine.dynamic.pipeline.order_for = delayed(1)
    before = weights_of(engine)
    with patch.object(planning, "OrderSchedule", LeavingOut), pytest.raises(BatchRefused) as refused:
        train(engine, run)
    stays = weights_of(engine) == before
    train(engine, run)
    return str(refused.value), stays and weights_of(engine) != before


def test_no_rank_steps_without_a_part_of_a_backward() -> None:
    for message, went_on in run_ranks(leave_out, 3, Run(3, 2, config=ADAMW)):
        assert "stage 1: 0 forwards were left without a backward, 1 backwards without their second half" in message
        assert went_on


def resume(_rank: int, run: Run, folder: str) -> tuple[Any, Any]:
    """Without a break, and with a checkpoint in the middle that another engine resumes."""
    whole = train_by(run, delayed(3))

    def halfway(engine: Any, batch: int) -> None:
        if batch == 2:
            engine.save_checkpoint(folder)

    train_by(run, delayed(3), halfway)
    engine = make_engine(run)
    engine.dynamic.pipeline.order_for = delayed(1)
    engine.load_checkpoint(folder)
    batches = data(0, run.micro_batches)
    for _ in range(2 * run.micro_batches):
        next(batches)
    losses = [float(engine.train_batch(batches)) for _ in range(2, run.num_batches)]
    return (whole.losses[2:], whole.digest), (losses, digest(engine))


@pytest.mark.exhaustive
@pytest.mark.parametrize("config", [ADAMW, {**ADAMW, **BF16_FP32_SUMS}], ids=["fp32", "bf16"])
def test_a_run_is_resumed(config: dict[str, Any], tmp_path: Any) -> None:
    for whole, resumed in run_ranks(resume, 3, Run(3, 4, dropout=0.1, config=config), str(tmp_path)):
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
