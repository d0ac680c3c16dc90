"""The runs of one scenario: static uniform, static parameters, ours, and fixed intervals; trained in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from benchmarks.scenarios.micro_batches import of_all_layers, on_all_stages
from scenarios.compare import Contender, build_contender
from scenarios.data import load_corpus
from scenarios.settings import Settings, config_folder, merge

SCENARIOS = ("pruning", "freezing", "early_exit", "moe", "mod", "sparse_attention")
UNIFORM, PARAMETERS, OURS = RUNS = ("static uniform", "static parameters", "ours")
EVERY = "every {}"
"""Name of a run that decides after each so-many-th batch."""

# Schedules that are over after six batches; half as much to compute where a batch takes long.
EARLY: Mapping[str, tuple[str, ...]] = {
    "pruning": ("scenario.start_batch=1", "scenario.end_batch=5", "scenario.every=1"),
    "freezing": ("scenario.batches=[2,4]",),
    "early_exit": ("scenario.first_batch=2",),
    "moe": ("ds.train_micro_batch_size_per_gpu=1",),
    "mod": ("scenario.batches=[2]",),
    "sparse_attention": ("scenario.batches=[2,4]", "ds.train_micro_batch_size_per_gpu=1"),
}


def read_settings(overrides: Sequence[str]) -> Settings:
    """The settings that ``conf/config.yaml`` gives with some overrides.

    Args:
        overrides: Hydra's, for example ``"scenario=mod"``.
    """
    with initialize_config_dir(version_base=None, config_dir=str(config_folder())):
        values: Any = OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)
    return Settings.from_mapping(values)


def settings_of(run: str, settings: Settings) -> tuple[Settings, bool]:
    """What one of the runs trains, and whether it re-partitions.

    Args:
        run: one of :data:`RUNS`, or :data:`EVERY` with a number of batches.
        settings: the scenario's.
    """
    method = "uniform" if run == UNIFORM else "parameters"
    found = replace(settings, partition_method=method)
    if run not in RUNS:
        section = {"dynamic_pipeline": {"rebalance_every": int(run.split()[1])}}
        found = replace(found, deepspeed=merge(found.deepspeed, section))
    return found, run not in (UNIFORM, PARAMETERS)


@dataclass
class TimedRun:
    """One of the runs while it is trained.

    Attributes:
        contender: engine, scenario and data.
        profiles: one a batch, warm-up included.
        hooks_s: seconds that the scenario's own hooks took around every batch, the same for all runs' code.
        micro_batches_s: of every batch, seconds of this rank's layers by micro-batch.
    """

    contender: Contender
    profiles: list[Any] = field(default_factory=list)
    hooks_s: list[float] = field(default_factory=list)
    micro_batches_s: list[list[list[list[float]]]] = field(default_factory=list)

    def train(self, window: range, *, timed: bool) -> None:
        """Train a window of batches."""
        for _ in self.contender.train_window(window, timed=timed):
            profile = self.contender.engine.last_batch_profile
            self.profiles.append(profile)
            self.micro_batches_s.append(
                of_all_layers(self.contender.engine, len(profile.layers), profile.num_micro_batches)
            )


def build_runs(settings: Settings, intervals: Sequence[int] = ()) -> dict[str, TimedRun]:
    """Build the runs; they read the same data.

    Static parameters is left out where it cuts as static uniform does: it would be the same run twice.

    Args:
        settings: the scenario's.
        intervals: of more runs, each of which decides after every so-many-th batch.
    """
    tokens = load_corpus(settings.data, settings.model.vocab_size).tokens
    runs: dict[str, TimedRun] = {}
    for name in (*RUNS, *map(EVERY.format, dict.fromkeys(intervals))):
        own, dynamic = settings_of(name, settings.profiling_every_batch())
        contender = build_contender(own, tokens, dynamic=dynamic)
        if name == PARAMETERS and contender.engine.partition == runs[UNIFORM].contender.engine.partition:
            continue
        contender.label = name
        runs[name] = TimedRun(contender)
        _time_hooks(runs[name])
    return runs


def _time_hooks(run: TimedRun) -> None:
    """Add up what the scenario does between batches: training needs it, wherever the stages end."""
    scenario: Any = run.contender.scenario

    def timed(hook: Callable[..., None], begins_batch: bool) -> Callable[..., None]:
        def call(engine: Any, batch: int) -> None:
            if begins_batch:
                run.hooks_s.append(0.0)
            start_s = time.perf_counter()
            hook(engine, batch)
            run.hooks_s[-1] += time.perf_counter() - start_s

        return call

    scenario.before_batch = timed(scenario.before_batch, True)
    scenario.after_batch = timed(scenario.after_batch, False)


def train_in_turns(runs: Mapping[str, TimedRun], settings: Settings) -> None:
    """Train all runs in alternating windows; each window begins with another run, in both directions."""
    names = list(runs)
    for number, window in enumerate(settings.run.windows()):
        shift = number // 2 % len(names)
        order = names[shift:] + names[:shift]
        for name in order if number % 2 == 0 else reversed(order):
            runs[name].train(window, timed=window.start >= settings.run.warmup_batches)


def as_values(run: TimedRun) -> dict[str, Any]:
    """What was measured as values that JSON can hold; collective, since overheads differ between ranks."""
    contender, summary = run.contender, run.contender.summary()
    hooks_s = torch.tensor(run.hooks_s, dtype=torch.float64, device=contender.engine.device)
    dist.all_reduce(hooks_s, op=dist.ReduceOp.MIN)  # the others contain waiting
    return {
        "windows_s": [seconds for _, _, seconds in contender.measured.windows],
        "losses": contender.measured.losses,
        "hooks_s": hooks_s.tolist(),
        "tokens_per_batch": contender.data.shape.tokens,
        "profiling_s": summary.profiling_s,
        "planning_s": summary.planning_s,
        "migrating_s": summary.migrating_s,
        "rebalanced_at": contender.measured.rebalanced_at,
        "boundaries": [list(profile.boundaries) for profile in run.profiles],
        "layers_s": [[[x.forward_s, x.backward_s] for x in profile.layers] for profile in run.profiles],
        "micro_batches_s": on_all_stages(run.micro_batches_s) if run.contender.label == OURS else [],
        "steps_s": [[stage.step_s for stage in profile.stages] for profile in run.profiles],
        "bubbles": [profile.bubble_ratio for profile in run.profiles],
        "stages": [[asdict(stage) for stage in profile.stages] for profile in run.profiles[-1:]],
        "num_micro_batches": run.profiles[-1].num_micro_batches,
        "names": [layer.name for layer in run.profiles[-1].layers],
    }
