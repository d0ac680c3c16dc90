"""Jobs that go on when ranks are killed, and what they are compared with."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dynpipe_ds import FatalError
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import DOOR, run_ranks
from tests.faults.points import Point, kill
from tests.faults.test_stopped import stop

NUM_BATCHES = 10
KILL_FROM = 2  # the batch from which on points count
KNOCKS_S = 0.5  # before each batch: a spare whose door is gone knocks at the next one within this
SAVE_EVERY = 2
NOTICED = Point("a loss is noticed", "dynpipe_ds.survive.survivor:Survivor.go_on")
FIRST = {1: (0, 8), 2: (0, 2, 8), 3: (0, 3, 5, 8), 4: (0, 2, 4, 6, 8)}


@dataclass(frozen=True)
class Job:
    """A training job that survives.

    Attributes:
        num_ranks: of its start, each a stage.
        config: DeepSpeed's.
        section: keys of the library's section.
        every: batches between snapshots.
        saves: whether checkpoints are saved, too.
        evaluates: whether batches are evaluated between.
        spares: processes that wait to join.
        num_micro_batches: of a batch, in place of the configuration's.
        stop_s: for how long ranks are stopped rather than killed.
        silent_s: after which ranks are asked whether they live.
        replicas: of each stage.
        save_every: batches between checkpoints.
        rereads: how data can be read again: ``"data_at"``, ``"state"`` of the iterator, or not at all.
        acts: whether something acts between batches.
        fewer: the key ``survive.fewer_replicas``.
    """

    num_ranks: int = 4
    config: Mapping[str, Any] = field(default_factory=dict)
    section: Mapping[str, Any] = field(default_factory=dict)
    every: int = 2
    saves: bool = False
    evaluates: bool = False
    spares: int = 0
    num_micro_batches: int | None = None
    silent_s: float = 30.0
    stop_s: float | None = None
    replicas: int = 1
    save_every: int = SAVE_EVERY
    rereads: str = ""
    acts: bool = False
    fewer: str = "last"

    @property
    def num_stages(self) -> int:
        """Of its start."""
        return self.num_ranks // self.replicas

    @property
    def run(self) -> Run:
        """How it trains: with dropout."""
        section = {
            "enabled": True, "rebalance_every": "never", **self.section,
            "survive": {
                "enabled": True, "snapshot_every": self.every, "silent_s": self.silent_s, "fewer_replicas": self.fewer,
            },
        }
        if self.spares:
            section["elastic"] = {"enabled": True, "door_file": os.environ[DOOR]}
        return Run(
            self.num_stages, first=FIRST[self.num_stages], dropout=0.1,
            config={**self.config, "dynamic_pipeline": section},
        )


@dataclass
class Outcome:
    """What a rank saw.

    Attributes:
        losses: of all batches.
        state: digest of its layers at the end.
        num_stages: at the end.
        partition: at the end.
        error: that it raised.
        batches: seconds of each, and when it was over.
        num_steps: of the optimizer.
        evaluated: losses of evaluations.
        noticed_at: when it first knew that a rank was lost, in seconds since 1970; empty if it never did.
        num_opened: how often data was read again.
        held: descriptors of the process after each batch.
        saved: the newest checkpoint that it knows of at the end.
        replicas: of each stage at the end.
        weights: of its layers at the end, by name.
    """

    losses: list[float] = field(default_factory=list)
    state: dict[str, str] = field(default_factory=dict)
    num_stages: int = 0
    partition: tuple[int, ...] = ()
    error: str = ""
    batches: list[tuple[float, float]] = field(default_factory=list)
    num_steps: int = 0
    evaluated: list[float] = field(default_factory=list)
    noticed_at: list[float] = field(default_factory=list)
    num_opened: int = 0
    held: list[int] = field(default_factory=list)
    saved: str | None = None
    replicas: int = 0
    weights: dict[str, Any] = field(default_factory=dict)

    def went_on_at(self, killed_at: float) -> float:
        """When it came back from the longest of the batches that were not over when a rank was killed."""
        return max(batch for batch in self.batches if batch[1] > killed_at)[1]


class Going:
    """Micro-batches of an iterator that can go back.

    Args:
        replica: whose they are.
        micro_batches: of a batch.
    """

    def __init__(self, replica: int, micro_batches: int) -> None:
        self._made = replica, micro_batches
        self.load_state_dict({"position": 0})

    def __iter__(self) -> Going:
        return self

    def __next__(self) -> Any:
        self._position += 1
        return next(self._data)

    def state_dict(self) -> dict[str, int]:
        return {"position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self._data, self._position = data(*self._made), state["position"]
        for _ in range(self._position):
            next(self._data)


class Freezing:
    """Lets a layer less train after every second batch."""

    def __init__(self, engine: Any) -> None:
        self._engine, self.frozen = engine, 0

    def before_batch(self, batch: int) -> None:
        for index, layer in self._engine.local_layers().items():
            layer.requires_grad_(index >= self.frozen)

    def after_batch(self, batch: int) -> None:
        self.frozen += (batch + 1) % 2 == 0 and self.frozen < 3

    def state_dict(self) -> dict[str, Any]:
        return {"frozen": self.frozen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.frozen = state["frozen"]


def read(engine: Any, job: Job, outcome: Outcome) -> Iterator[Any]:
    """This replica's data, and how it can be read again."""
    micro_batches = job.run.micro_batches

    def data_at(batch: int, replica: int) -> Iterator[Any]:
        outcome.num_opened += 1
        found = data(replica, micro_batches)
        for _ in range(batch * micro_batches):
            next(found)
        return found

    if job.rereads == "data_at":
        engine.data_at(data_at)
    replica = engine.grid.get_data_parallel_id()
    return Going(replica, micro_batches) if job.rereads == "state" else data(replica, micro_batches)


def train(rank: int, job: Job, faults: Mapping[int, Point], note: str) -> Outcome:
    """Train all batches; some ranks are killed at their points."""
    outcome = Outcome()
    engine = make_engine(job.run)
    if job.num_micro_batches is not None:
        engine.set_num_micro_batches(job.num_micro_batches)
    if job.acts:
        engine.between_batches(Freezing(engine))
    batches, others = read(engine, job, outcome), data(9, job.run.micro_batches)
    with ExitStack() as stack:
        stack.enter_context(NOTICED.arm(lambda: outcome.noticed_at.append(time.time())))
        try:
            for _ in range(engine.global_steps * job.run.micro_batches):  # a spare's, which comes later
                next(batches)
            for batch in range(engine.global_steps, NUM_BATCHES):
                if rank in faults and batch == KILL_FROM:
                    stop_s = job.stop_s
                    action = partial(kill, f"{note}.{rank}") if stop_s is None else partial(stop, stop_s)
                    stack.enter_context(faults[rank].arm(action))
                if job.spares:
                    time.sleep(KNOCKS_S)
                began = time.monotonic()
                outcome.losses.append(float(engine.train_batch(batches)))
                if job.saves and note and (batch + 1) % job.save_every == 0:  # without a place, nothing is saved
                    engine.save_checkpoint(f"{note}.checkpoints", client_state={"batch": batch + 1})
                if job.evaluates:
                    outcome.evaluated.append(float(engine.eval_batch(others)))
                outcome.batches.append((time.monotonic() - began, time.time()))
                outcome.held.append(len(os.listdir("/proc/self/fd")))
            engine.wait_for_disk()
        except FatalError as error:
            outcome.error = str(error)
            return outcome
    outcome.state, outcome.num_stages, outcome.partition = digest(engine), engine.num_stages, engine.partition
    outcome.saved = engine.last_checkpoint
    outcome.num_steps, outcome.replicas = engine.global_steps, engine.grid.get_data_parallel_world_size()
    outcome.weights = {
        f"{layer}.{name}": parameter.detach().double().numpy()
        for layer, module in engine.local_layers().items() for name, parameter in module.named_parameters()
    }
    return outcome


def train_again(rank: int, job: Job, first: Mapping[int, Point], second: Mapping[int, Point], note: str) -> list[float]:
    """Train six batches, and from a checkpoint of the second on once more; some ranks are killed in either.

    Returns:
        Losses of the second time.
    """
    engine = make_engine(job.run)
    losses: list[float] = []
    for faults, start in ((first, 0), (second, 2)):
        batches = data(0, job.run.micro_batches)
        for _ in range(start * job.run.micro_batches):
            next(batches)
        if start:
            engine.load_checkpoint(f"{note}.checkpoints")
            losses.clear()
        with ExitStack() as stack:
            for batch in range(start, 6):
                if rank in faults and batch == KILL_FROM:
                    stack.enter_context(faults[rank].arm(partial(kill, f"{note}.{rank}")))
                losses.append(float(engine.train_batch(batches)))
                if not start and batch + 1 == KILL_FROM:
                    engine.save_checkpoint(f"{note}.checkpoints")
    return losses


def run_job(job: Job, faults: Mapping[int, Point], note: str = "") -> list[Outcome | None]:
    """Start the job's processes and wait for them.

    Args:
        job: what to train.
        faults: whom to kill where.
        note: files that take the times begin like this.
    """
    outcomes: list[Outcome | None] = run_ranks(
        train, job.num_ranks, job, dict(faults), note, may_die=set(faults), newcomers=job.spares
    )
    return outcomes


def state_of(outcomes: list[Outcome | None]) -> dict[str, str]:
    """Digests of all layers."""
    return {layer: value for one in outcomes if one is not None for layer, value in one.state.items()}
