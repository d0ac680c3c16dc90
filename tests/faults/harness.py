"""A job that saves, is killed at a point, and goes on in new processes from the same folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dynpipe_ds.checkpoint import folder
from dynpipe_ds.checkpoint.manifest import MANIFEST_FILE, Manifest
from dynpipe_ds.ranks.fatal import RankLostError
from tests.distributed.configs import UNEVEN
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.faults.points import Point, kill

NUM_BATCHES = 8
SAVE_EVERY = 2

@dataclass(frozen=True)
class Job:
    """One training job.

    Attributes:
        num_ranks: processes.
        num_stages: stages; what is left over are replicas.
        config: DeepSpeed's, besides the section of the library.
        special: classes of some blocks; replicas may own parameters of them.
    """

    num_ranks: int = 3
    num_stages: int = 3
    config: Mapping[str, Any] = field(default_factory=dict)
    special: Mapping[int, type] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        """How the job trains: with dropout, and layers that move after the fourth batch."""
        special = dict(self.special)
        return Run(self.num_stages, first=UNEVEN[self.num_stages], dropout=0.1, special=special, config={
            **self.config,
            "dynamic_pipeline": {"enabled": True, "rebalance_every": 4, "min_gain": 0.0, "cost": "parameters"},
        })


@dataclass
class Outcome:
    """What one rank saw.

    Attributes:
        first: batch it went on from.
        losses: of the batches that it trained.
        partition: boundaries at the end.
        state: digest of weights and optimizer state at the end, by layer.
        lost: message of the error that a lost rank raised.
        ended_at: time of that error.
    """

    first: int = 0
    losses: list[float] = field(default_factory=list)
    partition: tuple[int, ...] = ()
    state: dict[str, str] = field(default_factory=dict)
    lost: str = ""
    ended_at: float = 0.0


def train(rank: int, job: Job, place: str | None, point: Point | None, victim: int) -> Outcome:
    """Go on from the newest checkpoint to the end, saving on the way; one rank is killed at a point.

    Args:
        rank: this one.
        job: what to train.
        place: folder of checkpoints; without one nothing is saved.
        point: where to kill, if anywhere.
        victim: whom.
    """
    outcome = Outcome()
    with ExitStack() as stack:
        if point is not None and not point.exchange:
            stack.enter_context(patch.object(folder, "_exchange", lambda one, other: False))
        engine = make_engine(job.run)
        armed = point.arm(partial(kill, f"{place}.killed")) if point is not None and rank == victim else None
        try:
            if armed is not None and point is not None and point.phase == "loading":
                stack.enter_context(armed)
            state = engine.load_checkpoint(place)[1] if place else None
            outcome.first = state["batch"] if state else 0
            batches = data(engine.grid.get_data_parallel_id(), job.run.micro_batches)
            for _ in range(outcome.first * job.run.micro_batches):
                next(batches)
            for batch in range(outcome.first, NUM_BATCHES):
                if armed is not None and point is not None and point.phase != "loading" and batch == point.batch:
                    stack.enter_context(armed)
                outcome.losses.append(float(engine.train_batch(batches)))
                if place and (batch + 1) % SAVE_EVERY == 0:
                    engine.save_checkpoint(
                        place, tag=point.tag if point is not None else None, client_state={"batch": batch + 1}
                    )
            engine.wait_for_disk()
            whose = f" of replica {engine.grid.get_data_parallel_id()}" if job.special else ""
            outcome.partition = engine.partition
            outcome.state = {layer + whose: value for layer, value in digest(engine).items()}
        except RankLostError as error:
            outcome.lost, outcome.ended_at = str(error), time.time()
    return outcome


def run_job(
    job: Job, place: Path | None, point: Point | None = None, victim: int | None = None
) -> list[Outcome | None]:
    """Start the job's processes and wait for them.

    Args:
        job: what to train.
        place: folder of checkpoints.
        point: where to kill.
        victim: whom.

    Returns:
        What every rank saw; ``None`` for the one that was killed.
    """
    may_die = () if victim is None else {victim}
    text = None if place is None else str(place)
    killed = -1 if victim is None else victim
    outcomes: list[Outcome | None] = run_ranks(
        train, job.num_ranks, job, text, point, killed, may_die=may_die
    )
    return outcomes


def state_of(outcomes: list[Outcome | None]) -> dict[str, str]:
    """Digests of all layers; replicas must agree.

    Args:
        outcomes: of all ranks.
    """
    merged: dict[str, str] = {}
    for outcome in outcomes:
        assert outcome is not None
        for layer, value in outcome.state.items():
            assert merged.setdefault(layer, value) == value, f"replicas differ in {layer}"
    return merged


def intact_checkpoints(place: Path) -> dict[str, int]:
    """Check every byte of every checkpoint that has a name.

    Args:
        place: folder of checkpoints.

    Returns:
        Names, and the batch that each goes on from, read as loading does.
    """
    names = sorted(f.name for f in place.iterdir() if f.is_dir() and f.name[0] != ".")
    names += [f.name[1:].removesuffix(".replaced") for f in place.glob(".*.replaced")]
    found = {}
    for name in dict.fromkeys(names):
        assert folder.find(place / name)
        manifest = Manifest.loads((place / name / MANIFEST_FILE).read_text())
        for path, entry in manifest.files.items():
            folder.verify(place / name / path, entry)
        found[name] = folder_batch(place / name, manifest)
    return found


def folder_batch(root: Path, manifest: Manifest) -> int:
    """The batch that a checkpoint goes on from.

    Args:
        root: the checkpoint.
        manifest: of it.
    """
    from dynpipe_ds.host.optimizer_files import Reader

    return int(Reader(root).read(manifest.model_files[0])["batch"])
