"""The live shrink: same bits as with all ranks, and the others leave with exit code 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dynpipe_ds import RepackError
from dynpipe_ds.host.world import World
from dynpipe_ds.release import Constraints
from dynpipe_ds.repacking.giving_back import GivingBack
from tests.distributed.configs import BF16, ZERO
from tests.distributed.models import Run, digest, make_engine, train
from tests.distributed.owned import Own, Shared
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "ZeRO-1": ZERO,
    "bf16 + ZeRO-1": {**BF16, **ZERO},
}
COMMON = {"gradient_clipping": 0.5, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}
Steps = dict[int, int]  # batch -> number of stages from there on


def train_and_shrink(_rank: int, run: Run, steps: Steps) -> Any:
    """Train, re-packing before some batches; what this rank knows at the end."""
    engine = make_engine(run)
    events = []

    def on_batch(engine: Any, batch: int) -> None:
        if batch in steps:
            events.append(engine.repack(steps[batch]))

    losses = train(engine, run, on_batch)
    return losses, digest(engine), engine.partition, events


def assert_same_bits(run: Run, ranks: int, steps: Steps) -> list[Any]:
    """Compare a run that shrinks with one that does not; what the survivors returned."""
    replicas = ranks // run.num_stages
    everyone = run_ranks(train_and_shrink, ranks, run, {})
    shrunk = run_ranks(train_and_shrink, ranks, run, steps, may_leave=range(1, ranks))
    survivors = [rank for rank in shrunk if rank is not None]
    assert len(survivors) == min(steps.values()) * replicas
    for losses, *_ in survivors:
        assert losses == everyone[0][0]
    layers = [{item for rank in runs for item in rank[1].items()} for runs in (everyone, survivors)]
    assert layers[0] == layers[1]
    return survivors


@pytest.mark.parametrize("name", mostly(OPTIMIZERS, ["bf16 + ZeRO-1"]))
def test_four_three_two_one(name: str) -> None:
    run = Run(4, num_batches=8, tied=name != "AdamW", dropout=0.1, config={**COMMON, **OPTIMIZERS[name]})
    survivors = assert_same_bits(run, 4, {2: 3, 4: 2, 6: 1})
    *_, partition, events = survivors[0]
    assert partition == (0, 8)
    assert [len(event.after) - 1 for event in events] == [3, 2, 1]
    assert [event.batch for event in events] == [2, 4, 6]


@pytest.mark.parametrize("name", mostly(OPTIMIZERS, ["AdamW"]))
def test_all_replicas_of_a_stage_leave(name: str) -> None:
    run = Run(2, num_batches=6, tied=name == "AdamW", config={**COMMON, **OPTIMIZERS[name]})
    assert_same_bits(run, 4, {3: 1})


@pytest.mark.parametrize("name", mostly(OPTIMIZERS, ["ZeRO-1"]))
def test_what_replicas_own_stays_theirs(name: str) -> None:
    run = Run(2, num_batches=6, special={1: Shared, 2: Own, 4: Shared}, config={**COMMON, **OPTIMIZERS[name]})
    assert_same_bits(run, 4, {3: 1})


def refuse(_rank: int, run: Run, num_stages: int, prepare: Callable[[Any], None] | None) -> Any:
    """Try to shrink before the third batch, and train on."""
    engine = make_engine(run)
    errors = []

    def on_batch(engine: Any, batch: int) -> None:
        if batch == 2:
            if prepare is not None:
                prepare(engine)
            try:
                engine.repack(num_stages)
            except (RepackError, ValueError) as error:
                errors.append(str(error))

    return train(engine, run, on_batch), digest(engine), errors


def fail_on_the_last_rank(engine: Any) -> None:
    """The store can't be reached from one rank."""

    def check(self: World) -> None:
        if torch.distributed.get_rank() == 2:
            raise RuntimeError("no store here")

    patch.object(World, "check", check).start()


def test_a_failure_before_the_vote_leaves_everything_as_it_was() -> None:
    run = Run(3, num_batches=5, config=COMMON)
    everyone = run_ranks(refuse, 3, run, 3, None)
    failed = run_ranks(refuse, 3, run, 2, fail_on_the_last_rank)
    for (losses, layers, _), (kept_losses, kept_layers, errors) in zip(everyone, failed, strict=True):
        assert kept_losses == losses and kept_layers == layers
        assert errors == failed[0][2]
        assert "rank 2: RuntimeError: no store here" in errors[0] and "training goes on with all ranks" in errors[0]


def train_from_one_iterator(_rank: int, run: Run, num_stages: int | None, own_loader: bool) -> Any:
    """Keep only the lowest stages, so that a stage that never read data becomes the last; evaluate, save, load."""
    batches = torch.Generator().manual_seed(3)
    samples = [torch.randint(17, (7,), generator=batches) for _ in range(80)]
    pairs = [(sample[:-1].clone(), sample[1:].clone()) for sample in samples]
    engine = make_engine(run)
    loader = torch.utils.data.DataLoader(pairs, batch_size=2)
    training, evaluation = (iter(deepspeed_repeating(loader)) for _ in range(2))
    if own_loader:
        engine.set_dataloader(deepspeed_repeating(loader))
    losses = []
    for batch in range(6):
        if batch == 3 and num_stages is not None:
            with patch.object(GivingBack, "constraints", lambda _: Constraints(lowest_stay=True)):
                engine.repack(num_stages)
        losses.append(float(engine.train_batch() if own_loader else engine.train_batch(training)))
        if batch != 4:
            losses.append(float(engine.eval_batch(evaluation)))
    return losses, digest(engine), engine.partition


def deepspeed_repeating(loader: Any) -> Any:
    from deepspeed.utils import RepeatingLoader

    return RepeatingLoader(loader)


@pytest.mark.parametrize(
    "own_loader",
    [pytest.param(False, id="iterator"), pytest.param(True, id="set_dataloader", marks=pytest.mark.exhaustive)],
)
def test_a_stage_that_read_nothing_finds_its_place_in_the_data(own_loader: bool) -> None:
    run = Run(3, config=COMMON)
    everyone = run_ranks(train_from_one_iterator, 3, run, None, own_loader)
    shrunk = run_ranks(train_from_one_iterator, 3, run, 2, own_loader, may_leave={2})
    assert shrunk[2] is None and shrunk[1] is not None
    assert shrunk[0][0] == everyone[0][0]
    assert shrunk[0][1] | shrunk[1][1] == {k: v for rank in everyone for k, v in rank[1].items()}


def save_after_shrinking(_rank: int, run: Run, folder: str) -> Any:
    """Shrink, save, train, load, train again."""
    engine = make_engine(run)
    losses = train(engine, run)
    engine.repack(2)
    engine.save_checkpoint(folder)
    first = train(engine, run)
    engine.load_checkpoint(folder)
    return losses, first, train(engine, run), engine.partition


def load_on_fewer(_rank: int, run: Run, folder: str) -> list[float]:
    """Take up in a new world what a re-packed run saved."""
    engine = make_engine(run)
    engine.load_checkpoint(folder)
    return train(engine, run)


def test_a_shrunken_run_saves_and_loads(tmp_path: Any) -> None:
    run = Run(3, num_batches=3, config=COMMON)
    results = run_ranks(save_after_shrinking, 3, run, str(tmp_path), may_leave={1, 2})
    _, first, again, partition = results[0]
    assert first == again and len(partition) == 3
    assert run_ranks(load_on_fewer, 2, replace(run, num_stages=2), str(tmp_path))[0] == first


def shrink_column_major(_rank: int, num_stages: int | None) -> Any:
    """Ranks numbered along the pipeline first: a stage's replicas are not neighbours."""
    from deepspeed.runtime.pipe.topology import ProcessTopology

    run = Run(2, num_batches=6, config=COMMON)
    engine = make_engine(run, topology=ProcessTopology(axes=["data", "pipe"], dims=[2, 2]), num_stages=None)

    def on_batch(engine: Any, batch: int) -> None:
        if batch == 3 and num_stages is not None:
            engine.repack(num_stages)

    return train(engine, run, on_batch), digest(engine), engine.grid.get_data_parallel_id()


def test_any_topology() -> None:
    everyone = run_ranks(shrink_column_major, 4, None)
    shrunk = run_ranks(shrink_column_major, 4, 1, may_leave={1, 3})
    assert [rank is None for rank in shrunk] == [False, True, False, True]
    assert shrunk[0][0] == shrunk[2][0] == everyone[0][0]
    assert [shrunk[0][2], shrunk[2][2]] == [0, 1]
    assert shrunk[0][1] == shrunk[2][1] == {k: v for rank in everyone for k, v in rank[1].items()}
