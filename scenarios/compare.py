"""Train one job twice at the same time, in turns: with a static and with a dynamic partition.

A machine that slows down or speeds up hurts both runs alike, because they alternate every few
batches: static, dynamic, dynamic, static, …
"""

from __future__ import annotations

import contextlib
import io
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from dynpipe_ds import DynamicPipelineEngine, DynamicPipelineModule
from scenarios.data import BatchShape, TokenBatches, Tokens, ValidationBatches
from scenarios.recording import Measurements
from scenarios.report.comparison import LAST_WINDOWS, RunSummary, perplexity
from scenarios.scenario import Scenario, State, build_layers, build_scenario
from scenarios.settings import Settings
from scenarios.validation import Validator

# Batches at the end of a run whose stage times the picture shows.
_LAST = 5
_DIGITS = 7  # of seconds


@dataclass
class Contender:
    """One of the two runs: its engine, its scenario, its data, and what was measured.

    Attributes:
        label: name of the run.
        engine: trains the model.
        scenario: changes it.
        data: the batches.
        measured: so far.
        validator: evaluates data that is not trained on; ``None`` if there is none.
    """

    label: str
    engine: DynamicPipelineEngine
    scenario: Scenario
    data: TokenBatches
    measured: Measurements = field(default_factory=Measurements)
    validator: Validator | None = None

    def train_window(self, batches: Sequence[int], *, timed: bool) -> Iterator[int]:
        """Train some batches, yielding each one's index when it is done.

        Args:
            batches: indices of consecutive batches.
            timed: whether they count for the throughput.
        """
        before_s, start_s, paused_s = _overheads_s(self.engine), _now_s(), 0.0
        for batch in batches:
            self._train(batch, timed=timed)
            if self.validator is not None and self.validator.is_due(batch + 1):
                paused_s += self.validate()
            yield batch
        if timed:
            measured = self.measured
            window_s = _now_s() - start_s - paused_s
            measured.windows.append([batches[0], len(batches), window_s])
            ends_s = zip(measured.timed_overheads_s, before_s, _overheads_s(self.engine), strict=True)
            measured.timed_overheads_s = [sum_s + after - before for sum_s, before, after in ends_s]

    @property
    def engine_acts(self) -> bool:
        """Whether the engine calls the scenario: it repeats batches, or lets workers join inside one."""
        config = self.engine.dynamic_config
        return config.survive.enabled or config.elastic.enabled

    def _train(self, batch: int, *, timed: bool) -> None:
        """Train one batch and note what was measured."""
        measured = self.measured
        start_s, known = time.perf_counter(), self.engine.last_batch_profile
        if not self.engine_acts:
            self.scenario.before_batch(self.engine, batch)
        order = self.engine.order
        assert order is not None, "both runs have the section"
        measured.recording.add_order(batch, self.engine.partition, order)
        loss = self.engine.train_batch(self.data.micro_batches(batch))
        if not self.engine_acts:
            self.after_batch(batch)
        measured.losses.append(float(loss))
        measured.batches_s.append(time.perf_counter() - start_s)
        profile = self.engine.last_batch_profile
        if profile is not None and profile is not known:  # not every batch is profiled
            measured.stages_s.append([stage.busy_s for stage in profile.stages])
            measured.recording.add_prediction(profile, order)
            if timed:
                measured.bubbles.append(profile.bubble_ratio)
                measured.imbalances.append(profile.imbalance)

    def after_batch(self, batch: int) -> None:
        """Let the scenario act, and note what it reports; in place of an earlier report if the batch was repeated."""
        self.scenario.after_batch(self.engine, batch)
        self.measured.reports[batch:] = [self.scenario.report(self.engine)]

    def validate(self) -> float:
        """Evaluate what is not trained on, if anything, unless this moment is evaluated already; collective.

        Returns:
            Seconds that it took, from barrier to barrier.
        """
        measured = self.measured
        trained = len(measured.losses)
        if self.validator is None or (measured.validations and measured.validations[-1]["after"] == trained):
            return 0.0
        start_s = _now_s()
        loss = self.validator.evaluate()
        measured.validations.append({"after": trained, "loss": loss, "perplexity": perplexity(loss)})
        return _now_s() - start_s

    def notes(self) -> dict[str, float | int | str]:
        """Return the short values of the scenario's last report."""
        reports = self.measured.reports
        last = reports[-1] if reports else {}
        return {name: value for name, value in last.items() if isinstance(value, (float, int, str))}

    def save(self, folder: Path, tag: str) -> None:
        """Write a checkpoint of everything into a folder of the run's own; collective over all ranks.

        Args:
            folder: holds the checkpoints of all runs.
            tag: name of this one.

        Raises:
            CheckpointError: on every rank, if any could not do its part.
        """
        state = {"scenario": self.scenario.state_dict(), "measured": asdict(self.measured)}
        self.engine.save_checkpoint(str(folder / self.label), tag, {"run": state}, save_latest=False)

    def load(self, folder: Path, tag: str) -> None:
        """Go on from a checkpoint; collective over all ranks.

        Args:
            folder: as for :meth:`save`.
            tag: as for :meth:`save`.

        Raises:
            CheckpointError: on every rank, if it is damaged or does not fit.
        """
        _, client_state = self.engine.load_checkpoint(str(folder / self.label), tag)
        assert client_state is not None
        state = client_state["run"]
        self.scenario.load_state_dict(state["scenario"])
        self.measured = Measurements.from_values(state["measured"])
        self.measured.resumed_at.append(len(self.measured.losses))

    def last_stages_s(self) -> list[float]:
        """Return the busy seconds a batch of each stage: medians of the last batches."""
        stages_s = self.measured.stages_s
        last = [times for times in stages_s[-_LAST:] if len(times) == len(stages_s[-1])]
        return [statistics.median(times) for times in zip(*last, strict=True)]

    def summary(self) -> RunSummary:
        """Sum up the run. Called on all ranks; the result is right on all of them."""
        measured = self.measured
        measured.timeline = [
            [*interval[:3], *(round(seconds, _DIGITS) for seconds in interval[3:5]), interval.payload]
            for interval in self.engine.timeline()
        ]
        measured.whole_backwards = [[stage, *reasons] for stage, reasons in self.engine.whole_backwards().items()]
        profiling_s, planning_s, migrating_s = _largest(measured.timed_overheads_s, self.engine.device)
        resumed = ", ".join(map(str, measured.resumed_at))
        all_windows = tuple((first, count, seconds) for first, count, seconds in measured.windows)
        last = all_windows[-LAST_WINDOWS:]
        batch_tokens = self.data.shape.tokens
        return RunSummary(
            label=self.label,
            tokens=batch_tokens * sum(count for _, count, _ in all_windows),
            seconds=_largest([measured.timed_s], self.engine.device)[0],
            losses=tuple(measured.losses),
            boundaries=tuple(self.engine.partition),
            bubble_ratio=statistics.mean(measured.bubbles) if measured.bubbles else None,
            imbalance=statistics.mean(measured.imbalances) if measured.imbalances else None,
            profiling_s=profiling_s,
            planning_s=planning_s,
            migrating_s=migrating_s,
            last_tokens_per_s=batch_tokens * sum(n for _, n, _ in last) / sum(s for *_, s in last) if last else None,
            num_rebalances=len(measured.rebalanced_at),
            validation_losses=tuple(found["loss"] for found in measured.validations),
            windows=all_windows,
            partitions=self._partitions(),
            orders=tuple((phase["first_batch"], phase["order"]) for phase in measured.recording.orders),
            notes=self.notes() | ({"resumed after batch": resumed} if resumed else {}),
        )


    def _partitions(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Every partition of the run so far, with the first batch that it held for."""
        events = self.measured.recording.rebalances
        first = events[0]["before"] if events else self.engine.partition
        return ((0, tuple(first)), *((event["batch"], tuple(event["after"])) for event in events))


def _now_s() -> float:
    """Return the time at which all ranks are here and their devices idle."""
    get_accelerator().synchronize()
    dist.barrier()
    return time.perf_counter()


def _overheads_s(engine: DynamicPipelineEngine) -> tuple[float, float, float]:
    overhead = engine.overhead
    return overhead.profiling_s, overhead.planning_s, overhead.migrating_s


def _largest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of each value over all ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return [float(value) for value in tensor]


@dataclass(frozen=True)
class _Acts:
    """A run's scenario as the engine calls it: it repeats batches, and tells workers that join what the others know."""

    run: Contender

    def before_batch(self, batch: int) -> None:
        self.run.scenario.before_batch(self.run.engine, batch)

    def after_batch(self, batch: int) -> None:
        self.run.after_batch(batch)

    def state_dict(self) -> State:
        return self.run.scenario.state_dict()

    def load_state_dict(self, state: State) -> None:
        self.run.scenario.load_state_dict(state)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Drop what is printed and warned about at the start; errors are raised anyway.

    Both runs that are compared are ours: how their losses differ from DeepSpeed's own does not matter.
    """
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*losses of this run may differ from those of another one")
            yield
    finally:
        logger.setLevel(level)


def build_contender(
    settings: Settings, tokens: Tokens, *, dynamic: bool, validation: Tokens | None = None
) -> Contender:
    """Build one of the two runs; they start from the same weights and read the same data.

    Args:
        settings: the job.
        tokens: the data.
        dynamic: whether this run re-partitions.
        validation: data that is not trained on, if any.

    Returns:
        A run that has not trained yet.

    Raises:
        ValueError: if the scenario does not fit the model or the data is too short.
    """
    num_stages = settings.run.num_stages or dist.get_world_size()
    settings = settings.decided(num_stages)
    scenario = build_scenario(settings.scenario, settings.scenario_settings)
    scenario.check_replicas(max(1, dist.get_world_size() // num_stages))  # a worker that is to join is alone yet
    start = settings.dynamic_partition_method if dynamic else None
    torch.manual_seed(settings.seed)  # new adapters follow from it
    with silence():
        module = DynamicPipelineModule(
            layers=build_layers(scenario, settings.model),
            loss_fn=scenario.loss_fn(),
            num_stages=num_stages,
            partition_method=settings.partition_method if start is None else start,
            seed_layers=True,
            base_seed=settings.seed,
        )
        config = settings.deepspeed_config(dynamic=dynamic)
        engine: Any = deepspeed.initialize(model=module, config=config)[0]
    shape = BatchShape(
        seq_len=settings.model.seq_len,
        micro_batch_size=engine.train_micro_batch_size_per_gpu(),
        num_micro_batches=engine.gradient_accumulation_steps(),
        num_replicas=engine.mpu.get_data_parallel_world_size(),
        replica=engine.mpu.get_data_parallel_rank(),
    )
    data = TokenBatches(
        tokens, shape, seed=settings.seed, vocab_size=settings.model.vocab_size, shuffle=settings.data.shuffle
    )
    scenario.repeats_after(data.repeats_after)
    label = "dynamic" if dynamic else "static"
    contender = Contender(label=label, engine=engine, scenario=scenario, data=data)
    if contender.engine_acts:
        engine.between_batches(_Acts(contender))
    if validation is not None:
        evaluated = ValidationBatches(
            validation, shape, vocab_size=settings.model.vocab_size, max_batches=settings.run.validate_batches
        )
        contender.validator = Validator(engine, evaluated, every=settings.run.validate_every)
    engine.on_rebalance(lambda event: contender.measured.rebalanced_at.append(len(contender.measured.losses)))
    engine.on_rebalance(lambda event: contender.measured.recording.add_rebalance(event))
    return contender


def train_in_turns(
    contenders: Sequence[Contender], settings: Settings, after_turn: Callable[[], object] = lambda: None
) -> Iterator[tuple[Contender, int]]:
    """Train all runs in alternating windows, yielding (run, batch) after every batch.

    The order is reversed from window to window, so that a steady drift cancels out. Runs that were continued
    train what is left; the first window of each is a warm-up, as at the start.

    Args:
        contenders: the runs.
        settings: the job.
        after_turn: called on every rank when a run has trained a window; what it takes is not timed.
    """
    for number, window in enumerate(settings.run.windows()):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            left = [batch for batch in window if batch >= len(contender.measured.losses)]
            if not left:
                continue
            timed = window.start >= settings.run.warmup_batches and left[0] not in contender.measured.resumed_at
            for batch in contender.train_window(left, timed=timed):
                yield contender, batch
            after_turn()
