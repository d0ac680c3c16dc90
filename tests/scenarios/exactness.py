"""Train a scenario twice on several ranks, with layers staying and moving, or stopped on the way; compare the bits."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scenarios.data import DataSettings
from scenarios.gpt import GPTConfig
from scenarios.settings import RunSettings, Settings, load_deepspeed_json, merge
from tests.distributed.models import digest
from tests.distributed.ranks import DOOR, run_ranks
from tests.joining.runs import wait_for_newcomers, what_is_held

MODEL = GPTConfig(depth=4, hidden=16, heads=2, seq_len=16, vocab_size=64)
SMALL_BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}


@dataclass(frozen=True)
class Job:
    """What is trained twice.

    Attributes:
        scenario: its name, or ``"package.module:Class"``.
        settings: keyword arguments of the scenario.
        stages: pipeline stages; with more ranks than that, the rest is data parallelism.
        optimizer: name of a file in ``conf/deepspeed_json``.
        model: size and kind of the GPT.
        num_batches: batches of each run.
        every: batches between two moves.
        text: train on the real text instead of on random tokens.
        max_tokens: random tokens that the data has.
        shuffle: of the data, every epoch or once.
        resizes: batch -> number of stages to re-pack to before it.
        joins: whether workers may join.
        batch: keys of DeepSpeed's configuration that differ from ``SMALL_BATCH``.
    """

    scenario: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    stages: int = 2
    optimizer: str = "fp32_adamw"
    model: GPTConfig = MODEL
    num_batches: int = 8
    every: int = 2
    text: bool = False
    max_tokens: int = 5000
    shuffle: str = "every_epoch"
    resizes: Mapping[int, int] = field(default_factory=dict)
    joins: bool = False
    batch: Mapping[str, int] = field(default_factory=dict)

    def moves(self, num_layers: int) -> dict[int, tuple[int, ...]]:
        """Boundaries before a batch: random ones, every few batches, no stage empty."""
        draw = random.Random(3)
        return {
            batch: (0, *sorted(draw.sample(range(1, num_layers), self.stages - 1)), num_layers)
            for batch in range(1, self.num_batches, self.every)
        }


@dataclass
class Trained:
    """What one rank knows of a run from the batch ``first`` on: losses, the scenario's reports, hashes of layers.

    ``held``: number of stages, and what the process held, after every resize of a run that workers may join.
    """

    losses: list[float]
    reports: list[Any]
    layers: dict[str, str]
    first: int = 0
    held: list[tuple[int, Counter[str]]] = field(default_factory=list)


def train_both(_rank: int, job: Job) -> tuple[Trained, Trained]:
    """Train on one rank without and with moves."""
    return train(job, moves=False), train(job, moves=True)


def build(job: Job) -> Any:
    """Build the run, a ``Contender``, on this rank of a started process group."""
    from scenarios.compare import build_contender
    from scenarios.data import load_tokens

    elastic = {"dynamic_pipeline": {"elastic": {"enabled": True, "door_file": os.environ[DOOR]}}} if job.joins else {}
    settings = Settings(
        model=job.model, scenario=job.scenario, scenario_settings=job.settings, data=DataSettings(shuffle=job.shuffle),
        deepspeed=merge(load_deepspeed_json(job.optimizer), SMALL_BATCH | job.batch | elastic),
        partition_method="uniform", run=RunSettings(num_stages=job.stages), seed=5, output_dir=Path(),
    )  # fmt: skip
    tokens = np.random.default_rng(0).integers(job.model.vocab_size, size=job.max_tokens).astype(np.uint8)
    return build_contender(settings, load_tokens() if job.text else tokens, dynamic=False)


def train(job: Job, *, moves: bool) -> Trained:
    """Train on this rank of a started process group."""
    run = build(job)
    engine, first = run.engine, run.engine.global_steps
    boundaries, held = job.moves(engine.partition[-1]) if moves else {}, list[tuple[int, Counter[str]]]()
    for batch in range(first, job.num_batches):
        if batch in boundaries:
            engine.repartition(boundaries[batch])
        if batch in job.resizes:
            resize(engine, job.resizes[batch])
            held += [(engine.num_stages, what_is_held(engine))] if job.joins else []
        list(run.train_window([batch], timed=True))
    trained = Trained(run.measured.losses, run.measured.reports, digest(engine), first, held)
    if job.joins:
        engine.destroy()  # who still waits hears that it is over
    return trained


def resize(engine: Any, num_stages: int) -> None:
    """Go on with so many stages, as soon as enough workers wait; nothing to do for one that has just joined them."""
    more = num_stages - engine.num_stages
    if more > 0:
        wait_for_newcomers(engine, more * engine.mpu.get_data_parallel_world_size())
    if more:
        engine.repack(num_stages)


def assert_same_bits(job: Job, ranks: int) -> Trained:
    """Fail unless moving layers changes no bit of losses, reports, weights, buffers and optimizer state.

    Args:
        job: what to train.
        ranks: world size.

    Returns:
        The static run as the first rank saw it, for further checks.
    """
    results = run_ranks(train_both, ranks, job)
    static, moved = ([rank[i] for rank in results] for i in (0, 1))
    for rank in (*static, *moved):
        assert rank.losses == static[0].losses
        assert rank.reports == static[0].reports
    assert all(np.isfinite(static[0].losses))
    layers = [{item for rank in run for item in rank.layers.items()} for run in (static, moved)]
    assert layers[0] == layers[1]
    assert len(layers[0]) == job.model.depth + 2, "replicas have different weights"
    return static[0]


# -- stopping and going on --------------------------------------------------------------------

SAVED_AFTER, CONTINUED_BATCHES = 5, 10


def train_and_save(_rank: int, jobs: dict[str, Job], folder: str) -> dict[str, Trained]:
    """Train each job to its end, with moves, saving on the way."""
    every = range(CONTINUED_BATCHES)
    return {name: _train_batches(build(job), job, every, Path(folder) / name) for name, job in jobs.items()}


def go_on(_rank: int, jobs: dict[str, Job], folder: str) -> dict[str, Trained]:
    """Build each job anew, load, and train the rest with other moves."""
    results = {}
    for name, job in jobs.items():
        run = build(job)
        run.load(Path(folder) / name, "middle")
        assert len(run.measured.losses) == SAVED_AFTER and run.measured.resumed_at == [SAVED_AFTER]
        results[name] = _train_batches(run, job, range(SAVED_AFTER, CONTINUED_BATCHES))
    return results


def _train_batches(run: Any, job: Job, batches: range, folder: Path | None = None) -> Trained:
    draw, layers = random.Random(batches.start), run.engine.partition[-1]
    for batch in batches:
        if batch % 3 == 1:
            run.engine.repartition((0, *sorted(draw.sample(range(1, layers), job.stages - 1)), layers))
        if batch == SAVED_AFTER and folder is not None:
            run.save(folder, "middle")
        list(run.train_window([batch], timed=True))
    return Trained(run.measured.losses, run.measured.reports, digest(run.engine))


def assert_continued(name: str, reference: list[Any], resumed: list[Any], *, changing: str | None = None) -> None:
    """Losses of the first rank, what the scenario reports, weights, buffers and optimizer state by layer.

    Args:
        name: of the job.
        reference: what every rank of the uninterrupted runs returned.
        resumed: same for the continued ones.
        changing: what in the reports must have changed before the run was stopped, and change afterwards.
    """
    whole, parts = reference[0][name], resumed[0][name]
    assert parts.losses == whole.losses
    layers = [{item for rank in ranks for item in rank[name].layers.items()} for ranks in (reference, resumed)]
    assert layers[0] == layers[1]
    if name == "freezing-cache":
        skipped = [[report["layers from cache"] for report in run.reports] for run in (whole, parts)]
        assert skipped[0][SAVED_AFTER] == 1 and skipped[1][SAVED_AFTER] == 0, "the cache is filled anew"
        assert skipped[0][-1] == skipped[1][-1] == 2
    assert _without_cache(parts.reports) == _without_cache(whole.reports)
    if changing is not None:
        values = [report[changing] for report in whole.reports]
        assert values[0] != values[SAVED_AFTER - 1], "nothing had happened when the run was stopped"
        assert any(value != values[SAVED_AFTER - 1] for value in values[SAVED_AFTER:]), "nothing was left to happen"


def _without_cache(reports: list[Any]) -> list[Any]:
    return [{**report, "layers from cache": None} for report in reports]
