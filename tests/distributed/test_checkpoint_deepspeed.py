"""Plain DeepSpeed loads our checkpoints, and we load its."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, product
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import PipelineModule

from dynpipe_ds import CheckpointError
from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, UNCLIPPED, WARMUP, ZERO
from tests.distributed.models import Run, base_config, data, layers_of, loss_fn, make_engine
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {**ADAMW, **UNCLIPPED},
    "zero1": {**ADAMW, **ZERO, **UNCLIPPED},
    "bf16_zero1": {**ADAMW, **BF16_FP32_SUMS, **UNCLIPPED},
}
PARTITION, SAVED_AFTER, BATCHES = [0, 3, 8], 3, 6
TIED = (False, True)


class Cut(PipelineModule):
    """DeepSpeed's own module with given boundaries."""

    def _partition_layers(self, method: Any = None) -> None:
        self.parts = list(method)
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


def plain_engine(run: Run) -> Any:
    torch.manual_seed(7)
    module = Cut(
        layers_of(run), num_stages=run.num_stages, loss_fn=loss_fn, seed_layers=True, partition_method=PARTITION
    )
    config = base_config(replace(run, plain=True), 1)
    return deepspeed.initialize(model=module, config=config)[0]


def train(engine: Any, run: Run, first: int, last: int) -> list[float]:
    stream = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    batches = islice(stream, first * run.micro_batches, None)
    return [float(engine.train_batch(batches)) for _ in range(first, last)]


def ours_to_plain(rank: int, folder: str, config: dict[str, Any]) -> list[Any]:
    results = []
    for tied in TIED:
        run = Run(2, tied=tied, first=(0, 6, 8), config={**config, **WARMUP})
        engine = make_engine(run)
        train(engine, run, 0, 2)
        engine.repartition(PARTITION)
        train(engine, run, 2, SAVED_AFTER)
        engine.save_checkpoint(f"{folder}/{tied}", client_state={"mine": 3})
        expected = train(engine, run, SAVED_AFTER, BATCHES)
        other = plain_engine(run)
        path, client = other.load_checkpoint(f"{folder}/{tied}")
        assert path is not None and client["mine"] == 3
        results.append((expected, train(other, run, SAVED_AFTER, BATCHES), engine.get_lr(), other.get_lr()))
    return results


def plain_to_ours(rank: int, folder: str, config: dict[str, Any]) -> list[Any]:
    results = []
    for tied in TIED:
        run = Run(2, tied=tied, first=(0, 6, 8), config={**config, **WARMUP})
        engine = plain_engine(run)
        train(engine, run, 0, SAVED_AFTER)
        engine.save_checkpoint(f"{folder}/{tied}", client_state={"mine": 3})
        expected = train(engine, run, SAVED_AFTER, BATCHES)
        other = make_engine(run)
        path, client = other.load_checkpoint(f"{folder}/{tied}")
        assert path is not None and client["mine"] == 3
        assert list(other.partition) == PARTITION
        results.append((expected, train(other, run, SAVED_AFTER, BATCHES), engine.get_lr(), other.get_lr()))
    return results


DIRECTIONS = {"ours_to_plain": ours_to_plain, "plain_to_ours": plain_to_ours}


@pytest.mark.parametrize(
    ("optimizer", "direction", "ranks"),
    mostly(
        product(OPTIMIZERS, DIRECTIONS, [2, 4]), [("zero1", "ours_to_plain", 2), ("bf16_zero1", "plain_to_ours", 2)]
    ),
)
def test_losses_go_on(optimizer: str, direction: str, ranks: int, tmp_path: Any) -> None:
    for results in run_ranks(DIRECTIONS[direction], ranks, str(tmp_path), OPTIMIZERS[optimizer]):
        for expected, losses, lr, other_lr in results:
            assert losses == expected
            assert lr == other_lr


def more_stages_and_another_model(rank: int, folder: str, _: Any) -> list[Any]:
    """A checkpoint of plain DeepSpeed on two stages, loaded on four."""
    run = Run(4, first=(0, 2, 4, 6, 8), config={**ADAMW, **UNCLIPPED, **WARMUP}, micro_batches=8)
    engine = make_engine(run)
    engine.load_checkpoint(f"{folder}/False")
    assert engine.partition == (0, 2, 4, 6, 8) and engine.global_steps == SAVED_AFTER
    losses = train(engine, run, SAVED_AFTER, BATCHES)
    for blocks, text in ((7, "no partition of this model has"), (5, "no partition of this model has")):
        other = make_engine(replace(run, num_blocks=blocks, first=(0, 2, 4, 6, blocks + 2)))
        with pytest.raises(CheckpointError, match=text):
            other.load_checkpoint(f"{folder}/False")
    return losses


def save_plain_on_two(rank: int, folder: str, _: Any) -> list[float]:
    run = Run(2, config={**ADAMW, **UNCLIPPED, **WARMUP}, micro_batches=8)
    engine = plain_engine(run)
    train(engine, run, 0, SAVED_AFTER)
    engine.save_checkpoint(f"{folder}/False")
    return train(engine, run, SAVED_AFTER, BATCHES)


def test_plain_checkpoint_on_more_stages(tmp_path: Any) -> None:
    expected = run_ranks(save_plain_on_two, 2, str(tmp_path), None)
    losses = run_ranks(more_stages_and_another_model, 4, str(tmp_path), None)
    assert losses[0] == expected[0]
