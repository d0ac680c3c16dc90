"""Real compute on two ranks: the engine under 1F1B and as it chooses, batch by batch in turns."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.ranks import Send, now_s, on_ranks
from benchmarks.record import environment, save, table
from benchmarks.scenarios.contenders import SCENARIOS, read_settings
from scenarios.compare import build_contender, silence
from scenarios.data import load_corpus
from scenarios.report.interval import Estimate, median_of_ratios, ratio_of_totals
from scenarios.settings import SECTION, Settings

OWN, USUAL, AUTO, ROOMY = "DeepSpeed's own engine", "1F1B", "auto", "auto, activation_budget 2"

NEEDED_BUBBLE = 0.12
GOALS = {"scenario": 1.03, AUTO: 1.02, ROOMY: 1.04}
LEAST = 0.99
SIZE = ("run.batches=48", "run.warmup_batches=16", "run.window=4")
WIDE = ("model.hidden=512", "model.heads=8", "model.depth=8", "ds.gradient_accumulation_steps=4")
"""Splitting a backward costs a few percent here; at hidden size 256 and 256 tokens a micro-batch about a tenth."""
NARROW = "none, hidden size 256"
QUICK = ("run.batches=16", "run.warmup_batches=8", "run.window=2", "model.depth=6")


class Runner:
    """One of the runs that take turns.

    Args:
        settings: the job.
        name: one of :data:`OWN`, :data:`USUAL`, :data:`AUTO` and :data:`ROOMY`.
    """

    def __init__(self, settings: Settings, name: str) -> None:
        self.name = name
        own = {ROOMY: {"schedule": "auto", "activation_budget": 2.0}}.get(name, {"schedule": "auto"})
        section = settings.deepspeed[SECTION] | ({"schedule": "1f1b"} if name in (OWN, USUAL) else own)
        settings = replace(settings, deepspeed={**settings.deepspeed, SECTION: section})
        tokens = load_corpus(settings.data, settings.model.vocab_size).tokens
        contender = build_contender(settings, tokens, dynamic=name != OWN)
        self.engine: Any = _own_engine(settings) if name == OWN else contender.engine
        self.scenario, self.data = contender.scenario, contender.data
        self.batches_s: list[float] = []
        self.losses: list[float] = []
        self.bubbles: list[float] = []
        self.split: list[bool] = []

    def train(self, window: Sequence[int]) -> None:
        """Train some batches.

        Args:
            window: their numbers.
        """
        engine = self.engine
        for batch in window:
            if self.name != OWN:
                self.scenario.before_batch(engine, batch)
                self.split.append(engine.order is not None and any(map(engine.order.split, range(2))))
            started_s = now_s()
            self.losses.append(float(engine.train_batch(self.data.micro_batches(batch))))
            self.batches_s.append(now_s() - started_s)
            if self.name != OWN:
                self.scenario.after_batch(engine, batch)
                profile = engine.last_batch_profile
                self.bubbles.append(0.0 if profile is None else profile.bubble_ratio)

    def values(self) -> dict[str, Any]:
        """What was measured, plain values."""
        return {
            "batches_s": self.batches_s, "losses": self.losses, "bubbles": self.bubbles, "split": self.split,
            "partition": [] if self.name == OWN else list(self.engine.partition),
        }


def _own_engine(settings: Settings) -> Any:
    """DeepSpeed's module and engine for a job that changes nothing."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from scenarios.scenario import build_layers, build_scenario

    scenario = build_scenario(settings.scenario, settings.scenario_settings)
    config = {key: value for key, value in settings.deepspeed_config(dynamic=False).items() if key != SECTION}
    with silence():
        module = PipelineModule(
            layers=build_layers(scenario, settings.model), loss_fn=scenario.loss_fn(), num_stages=2,
            partition_method=settings.partition_method, base_seed=settings.seed,
        )  # fmt: skip
        return deepspeed.initialize(model=module, config=config)[0]


def run_rank(send: Send, scenario: str, options: argparse.Namespace) -> None:
    """Train one scenario's runs on this rank, in turns."""
    torch.manual_seed(0)
    name = "none" if scenario == NARROW else scenario
    is_wide = scenario not in (NARROW, "sparse_attention")  # that one has a model of its own, with long sequences
    size = (*SIZE, *WIDE) if is_wide else SIZE
    settings = read_settings([f"scenario={name}", *(QUICK if options.quick else size), *options.set])
    names = (OWN, USUAL, AUTO, ROOMY) if name == "none" else (USUAL, AUTO)
    runners = [Runner(settings, name) for name in names]
    for number, window in enumerate(settings.run.windows()):
        shift = number // 2 % len(runners)
        order = runners[shift:] + runners[:shift]
        for runner in order if number % 2 == 0 else reversed(order):
            runner.train(window)
    timed = [window for window in settings.run.windows() if window.start >= settings.run.warmup_batches]
    model = settings.model
    send({
        "scenario": scenario,
        "model": f"{model.depth} x {model.hidden}, {settings.deepspeed['gradient_accumulation_steps']}",
        "windows": [[window.start, window.stop] for window in timed],
        "runs": {runner.name: runner.values() for runner in runners},
    })


def gains(values: Mapping[str, Any]) -> dict[str, Estimate]:
    """How many times as fast as its baseline each planned run is, with its interval.

    Where the model does not change, batches are pairs and the median counts; else windows, and their sum.

    Args:
        values: of :func:`run_rank`.
    """
    runs = values["runs"]
    changes = OWN not in runs
    baseline = runs[USUAL if changes else OWN]["batches_s"]
    found = {}
    for name in [AUTO] if changes else [USUAL, AUTO, ROOMY]:
        ours = runs[name]["batches_s"]
        if changes:
            pairs = [[math.fsum(s[a:b]) for s in (baseline, ours)] for a, b in values["windows"]]
            found[name] = ratio_of_totals(*zip(*pairs, strict=True))
        else:
            first = values["windows"][0][0]
            found[name] = median_of_ratios(baseline[first:], ours[first:])
    return found


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The table in Markdown.

    Args:
        rows: of :func:`run_rank`.
    """
    head = (
        "scenario", "blocks x hidden size, micro-batches", "baseline", "run", "speedup (95% interval)",
        "bubble under 1F1B", "batches that split backwards", "goal",
    )  # fmt: skip
    lines = []
    for row in rows:
        first = row["windows"][0][0]
        usual = row["runs"][USUAL]["bubbles"][first:]
        bubble = math.fsum(usual) / len(usual)
        for name, gain in gains(row).items():
            split = row["runs"][name]["split"][first:]
            is_still = OWN in row["runs"]
            goal = GOALS.get(name if is_still else "scenario", LEAST)
            goal = goal if is_still or bubble > NEEDED_BUBBLE else LEAST
            lines.append([
                row["scenario"], row["model"], OWN if is_still else USUAL, name, gain.text(".3f"), f"{bubble:.1%}",
                f"{sum(split)} of {len(split)}",
                f"{goal:.2f}x: {'reached' if gain.value >= goal else 'not reached'}",
            ])
    ours = [[tuple(run["losses"]) for name, run in row["runs"].items() if name != OWN] for row in rows]
    same = sum(len(set(losses)) == 1 for losses in ours)
    return (
        "# Orders on two ranks, real compute\n\nEngines take turns. *Baseline* of scenarios that change the model is "
        "the dynamic engine under 1F1B, and the ratio is of the sums of all windows; of `none` it is DeepSpeed's own "
        f"engine, and the median of batches counts. Goals are for a bubble above {NEEDED_BUBBLE:.0%}; below it, "
        f"{LEAST:.2f}x.\n\n"
        + table(head, lines)
        + f"\n\nLosses have equal bits under every schedule: {same} of {len(rows)} scenarios."
    )


def run(options: argparse.Namespace) -> None:
    """Measure all scenarios and write what was found.

    Args:
        options: of the command line.
    """
    values: dict[str, Any] = {"environment": environment(), "rows": []}
    for scenario in options.only or ("none", NARROW, *SCENARIOS):
        [row] = on_ranks(2, run_rank, scenario, options)
        values["rows"].append(row)
        for name, gain in gains(row).items():
            print(f"{scenario}, {name}: {gain.text('.3f')}", flush=True)
        save(options.out, "real", values, text(values["rows"]))  # what was measured is kept if the run is ended


__all__ = ["run", "text"]
