"""What goes wrong with a snapshot costs that snapshot: training neither waits nor breaks, and says so once."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dynpipe_ds.snapshots import taking, transfer
from dynpipe_ds.snapshots.inventory import Seat
from dynpipe_ds.snapshots.memory import state_bytes
from dynpipe_ds.snapshots.restore import SnapshotError, newest
from tests.distributed.configs import ADAMW
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.distributed.test_snapshots import CONFIGS, surviving, train
from tests.matrix import mostly

RUN = Run(num_stages=3, config=ADAMW)
EACH = surviving(RUN, snapshot_every=1)


def start(run: Run) -> tuple[Any, Any]:
    engine = make_engine(run)
    return engine, data(engine.grid.get_data_parallel_id(), run.micro_batches)


def told(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "survive:" in str(w.message)]


def with_a_slow_neighbour(rank: int) -> Any:
    plain, batches = start(RUN)
    losses = train(plain, batches, 6)
    engine, batches = start(EACH)
    courier = engine.dynamic.snapshots._courier
    whole, lets_go = courier._exchange, []
    if rank == 1:

        def slow(*args: Any) -> Any:
            while not lets_go:
                time.sleep(0.01)
            return whole(*args)

        courier._exchange = slow
    found = train(engine, batches, 5)
    busy = courier.is_busy
    lets_go.append(True)
    engine.dynamic.snapshots.pause()
    found += train(engine, batches, 1)
    engine.dynamic.snapshots.pause()
    return losses == found, busy, newest(engine.dynamic)


def test_a_slow_neighbour_is_not_waited_for() -> None:
    assert run_ranks(with_a_slow_neighbour, 3) == [(True, True, 5)] * 3  # the first took five batches to come through


def with_a_copy_that_fails(rank: int, where: str) -> Any:
    transfer.PATIENCE_S = 3.0
    engine, batches = start(EACH)
    snapshots = engine.dynamic.snapshots
    train(engine, batches, 2)
    snapshots.pause()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 1:

            def fails(*_args: Any) -> Any:
                raise OSError("no such wire")

            if where == "capture":
                whole, taking.capture = taking.capture, fails
            else:
                setattr(snapshots._courier, where, fails)
        train(engine, batches, 1)
        snapshots.pause()
        before = newest(engine.dynamic)
        if rank == 1 and where == "capture":
            taking.capture = whole
        train(engine, batches, 2)
        snapshots.pause()
        time.sleep(0.1)
        after = newest(engine.dynamic)
        train(engine, batches, 1)
    return before, after, told(caught)


@pytest.mark.parametrize("where", ["capture", "_finish", "_swap"])
def test_a_copy_that_fails_is_dropped_and_later_ones_come(where: str) -> None:
    results = run_ranks(with_a_copy_that_fails, 3, where)
    assert {before for before, _, _ in results} == {1}, "the one before is still common"
    if where == "_finish":  # for good, on this rank
        assert {after for _, after, _ in results} == {1}
    else:
        assert {after for _, after, _ in results} == {4}
    texts = results[1][2]
    assert sum("no such wire" in text for text in texts) == 1, texts


def with_damage(rank: int) -> Any:
    engine, batches = start(EACH)
    train(engine, batches, 3)
    snapshots = engine.dynamic.snapshots
    snapshots.pause()
    before = digest(engine)
    if rank == 2:
        snapshots.store.get(2, Seat(2, 0)).data[100] += 1
    try:
        engine.dynamic.repeating.roll_back()
    except SnapshotError as error:
        return str(error), digest(engine) == before, torch.isfinite(engine.train_batch(batches)).item()
    return None


def test_a_damaged_copy_is_refused_by_all_and_nothing_has_changed() -> None:
    for text, is_same, trains_on in run_ranks(with_damage, 3):
        assert "going back to the snapshot of batch 2 failed, nothing has changed" in text
        assert "on rank 2 is damaged" in text
        assert is_same
        assert trains_on


def without_memory(_rank: int) -> str:
    try:
        make_engine(surviving(RUN, max_bytes=1000))
    except ValueError as error:
        return str(error)
    return ""


def test_what_does_not_fit_is_refused_at_the_start_by_all() -> None:
    texts = run_ranks(without_memory, 3)
    assert len(set(texts)) == 1
    assert "rank 0: copies for survive need" in texts[0]
    assert "survive.max_bytes allows 1000" in texts[0]


def that_changes(rank: int) -> Any:
    engine, batches = start(surviving(RUN, snapshot_every=4))
    train(engine, batches, 2)
    for layer, module in engine.local_layers().items():
        if layer < 3:
            module.requires_grad_(False)
    train(engine, batches, 1)
    engine.dynamic.snapshots.pause()
    return newest(engine.dynamic), engine.dynamic.repeating.roll_back()


def test_a_change_that_would_not_be_repeated_is_covered_at_once() -> None:
    assert run_ranks(that_changes, 3) == [(2, 2)] * 3


def with_auto(_rank: int) -> Any:
    engine, batches = start(replace(surviving(RUN), micro_batches=4))
    taken = []
    snapshots = engine.dynamic.snapshots
    take = snapshots._take
    snapshots._take = lambda batch: (taken.append(batch), take(batch))
    train(engine, batches, 12)
    snapshots.pause()
    return taken, engine.overhead.snapshots_s


def test_all_ranks_agree_how_often() -> None:
    results = run_ranks(with_auto, 3)
    assert len({tuple(taken) for taken, _ in results}) == 1
    assert results[0][0][0] == 0
    assert len(results[0][0]) < 12, "tiny batches: every one would cost more than 3%"
    assert all(seconds > 0 for _, seconds in results)


def after_loading(_rank: int, folder: str) -> Any:
    engine, batches = start(surviving(RUN, snapshot_every=4))
    train(engine, batches, 2)
    engine.save_checkpoint(folder, "early")
    train(engine, batches, 4)
    engine.load_checkpoint(folder, "early")
    losses = train(engine, batches, 3)
    end = digest(engine)
    engine.dynamic.snapshots.pause()
    again: list[float] = []
    run_batch = engine.dynamic.pipeline.run_batch
    engine.dynamic.pipeline.run_batch = lambda: again.append(float(run_batch()))
    batch = engine.dynamic.repeating.roll_back()
    return batch, again == losses, digest(engine) == end, len(set(losses))


def test_after_loading_a_checkpoint_the_past_is_another(tmp_path: Path) -> None:
    """What was kept for batches of the same numbers is neither trained on nor gone back to."""
    assert run_ranks(after_loading, 3, str(tmp_path)) == [(2, True, True, 3)] * 3


def estimated(_rank: int, run: Run) -> Any:
    engine, batches = start(run)
    stated = state_bytes(engine.dynamic.stage)
    train(engine, batches, 5)
    engine.dynamic.snapshots.pause()
    copies = engine.dynamic.snapshots.inventory()
    own, theirs = sorted(copies, key=lambda s: s.owner != engine.dynamic.snapshots._seat)
    store = engine.dynamic.snapshots.store
    return stated, own.num_bytes, theirs.num_bytes, store.num_bytes


@pytest.mark.parametrize(("config", "replicas"), mostly(
    [(config, replicas) for config in ("adamw", "zero1", "bf16_zero1") for replicas in (1, 2)],
    [("adamw", 1), ("zero1", 2), ("bf16_zero1", 2)],
))  # fmt: skip
def test_memory_is_what_was_stated(config: str, replicas: int) -> None:
    run = surviving(Run(num_stages=2, config=CONFIGS[config], width=64), snapshot_every=4)
    results = run_ranks(estimated, 2 * replicas, run)
    lines = 64 * 200  # every tensor begins at a line of its own
    for rank, ((whole, _), own, theirs, in_store) in enumerate(results):
        sent = results[(rank - 1) % len(results)][0][1]
        assert 0.8 * whole <= own <= whole + lines
        assert theirs <= sent + lines
        assert in_store <= 2 * (whole + sent) + 4 * lines
