"""The journal of real engines: what training tells, the same bits with it and without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dynpipe_ds.journal import read_journal
from tests.distributed.configs import ADAMW, BY_HAND
from tests.distributed.models import Run, make_engine, train
from tests.distributed.ranks import run_ranks


def run_of(folder: str | None) -> Run:
    section = {**BY_HAND, "profile_every": 2} | ({"journal": folder} if folder else {})
    return Run(2, 6, config={**ADAMW, "dynamic_pipeline": section}, moves={3: (0, 3, 8)}, first=(0, 4, 8))


def trained(_rank: int, folder: str | None) -> tuple[Any, ...]:
    run = run_of(folder)
    engine = make_engine(run)
    losses = train(engine, run)
    return losses, engine.last_batch_profile, engine.partition


def continued(_rank: int, folder: str) -> list[float]:
    """Four batches and a checkpoint; two more that are lost; then from the checkpoint on."""
    run = Run(2, 4, config=run_of(folder).config)
    engine = make_engine(run)
    train(engine, run)
    engine.save_checkpoint(folder + "/checkpoints")
    train(engine, Run(2, 2))
    engine.destroy()
    engine = make_engine(run)
    engine.load_checkpoint(folder + "/checkpoints")
    train(engine, Run(2, 3))
    return []


def test_what_a_run_tells(tmp_path: Path) -> None:
    """By the first rank alone; losses to the last bit, and the moves where they were."""
    (losses, profile, partition), (others, *_) = run_ranks(trained, 2, str(tmp_path))
    without, _ = run_ranks(trained, 2, None)
    assert losses == without[0], "equal bits"
    journal = read_journal(tmp_path)
    assert list(tmp_path.iterdir()) == [journal.file] and not journal.num_unreadable
    assert [each.loss for each in journal.batches] == losses == others
    assert all(each.seconds > 0 for each in journal.batches)
    assert journal.profiles[-1].batch == profile.batch and journal.profiles[-1].boundaries == partition == (0, 3, 8)
    (move,) = journal.moves
    assert (move.batch, move.before, move.after) == (3, (0, 4, 8), (0, 3, 8)) and move.bytes_moved > 0
    assert journal.about["samples_a_batch"] == 8 and journal.about["num_ranks"] == 2
    last = journal.last_profile
    assert last is not None and [layer.name for layer in last.layers] == [layer.name for layer in profile.layers]
    sizes = [(layer.num_parameters, layer.state_bytes, layer.activation_bytes) for layer in profile.layers]
    assert [(layer.num_parameters, layer.state_bytes, layer.activation_bytes) for layer in last.layers] == sizes


def test_a_run_that_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(continued, 2, str(tmp_path))
    journal = read_journal(tmp_path)
    assert [each.batch for each in journal.batches] == list(range(7)) and journal.resumed_at == [4]
