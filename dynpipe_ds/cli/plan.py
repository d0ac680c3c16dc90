"""``dynpipe plan``: from layer times to stage boundaries and an order, with what they promise."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from math import fsum
from typing import Any

from dynpipe_ds.cli import finer, reading, show
from dynpipe_ds.cli.command import OK, ProblemError, Result, UsageError, add_command, usage, users_code
from dynpipe_ds.config import SECTION, DynamicPipelineConfig, check_against_model, parse_config
from dynpipe_ds.decide.methods import COSTS
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.migration.moves import plan_moves
from dynpipe_ds.partition import (
    InfeasiblePartitionError,
    StageMemory,
    get_partitioner,
    partitioner_names,
    run_partitioner,
)
from dynpipe_ds.placement import Placement
from dynpipe_ds.planning import plan_batch, plan_on_partition, worker_bytes_of_1f1b
from dynpipe_ds.simulation import Simulation, Workload, simulate
from dynpipe_ds.simulation.workload import links_s

_OF_THE_SECTION = (
    "partitioner", "cost", "memory_cap_bytes", "pinned_cuts", "stage_speeds", "allow_empty_stages", "schedule",
    "activation_budget",
)  # fmt: skip
SCHEDULES = ("auto", "1f1b", "planned")
_COLUMNS = {
    "stage": "stage", "layers": "layers", "forward ms": "forward_s", "backward ms": "backward_s",
    "idle": "bubble_ratio", "state MiB": "state_bytes", "in flight": "micro_batches_in_flight",
    "activations MiB": "activation_bytes", "peak MiB": "peak_bytes",
}  # fmt: skip
_COMPARED_COLUMNS = {
    "partition by": "partitioner", "order": "order", "batch ms": "batch_s", "bubble": "bubble_ratio",
    "largest peak MiB": "peak_bytes", "partition": "partition",
}  # fmt: skip
_PRESENT, _TOGETHER = "now", "together"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "plan", run)
    known = f"{', '.join(partitioner_names())} or one of --import (default optimal)"
    parser.option("--stages", "N", "number of stages (default: the profile's)", reading.whole(1))
    parser.option("--partitioner", "NAME", known)
    parser.add_argument("--cost", choices=COSTS, help="what to balance (default time)")
    cap = "most that a stage may hold: 16GiB, or one size per stage, 16GiB,8GiB,..."
    parser.option("--memory-cap-bytes", "SIZE", cap, reading.one_or_each(reading.num_bytes))
    whole_numbers, numbers = reading.listed(int, "whole numbers"), reading.listed(float, "numbers")
    parser.option("--pinned-cuts", "C,...", "c keeps layers c-1 and c on one stage", whole_numbers)
    parser.option("--stage-speeds", "V,...", "relative speed of every stage's worker", numbers)
    parser.flag("--allow-empty-stages", "a stage may have no layer", default=None)
    parser.option("--config", "FILE", f'DeepSpeed JSON whose "{SECTION}" section has these settings')
    parser.option("--current", "PARTITION", "boundaries now in use, to compare with (default: the profile's)")
    parser.add_argument(
        "--schedule", choices=SCHEDULES,
        help="order of forwards and backwards: 1f1b, planned, or auto (default): planned if it is known which part of "
        "a backward can run later",
    )
    budget = "activations that a planned order may hold, as a multiple of the fullest worker's under 1F1B (default 1)"
    parser.option("--activation-budget", "X", budget, reading.at_least_0("a finite number > 0"))
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="import this module first; it may call register_partitioner",
    )
    reading.add_simulated(parser)


def run(arguments: argparse.Namespace) -> Result:
    """Choose stage boundaries for a profile, and the order of forwards and backwards.

    Prints the partition and the order, the simulated time and bubble of a batch, and what every stage holds at its
    peak. A table compares what each partitioner chooses, under 1F1B and under the order planned for it in the same
    memory. "now" is the present partition, "together" the best partition and order. "finer" says what cutting each
    repeated layer into halves would gain, if that is 3% or more.
    Planned orders need to know which part of a backward can run later. The profile says so if a backward was split
    while it was measured; otherwise --weight-share assumes it. Options named like a key of the "dynamic_pipeline"
    section mean the same. --config reads them from a DeepSpeed JSON; options given here win.

    Examples:
      dynpipe plan profile.json --stages 4
      dynpipe plan profile.json --stages 4 --memory-cap-bytes 16GiB --weight-share 0.4
      dynpipe plan profile.json --stages 2 --partitioner diffusion --stage-speeds 1,0.5 --pinned-cuts 1
      dynpipe plan profile.json --stages 2 --config ds_config.json --json
    """
    for module in arguments.imports:
        where = f"--import {module}"
        with users_code(f"{where}: can't be imported:"), usage(f"{where}: "):  # register_partitioner's own complaint
            reading.module(module, where=where, remedy="give a module that Python finds from the current folder")
    profile = reading.profile(arguments)
    num_stages = arguments.stages or len(profile.boundaries) - 1
    if num_stages < 1:
        raise UsageError(f"{arguments.profile} has no partition of its own; give the number of stages by --stages")
    with usage():
        try:
            config = _config(arguments, len(profile.layers), num_stages, profile.num_micro_batches)
            case = _Case(profile, num_stages, config, arguments)
            values = case.values()
        except InfeasiblePartitionError as error:
            raise ProblemError(str(error)) from error
    return OK, _text(case, values), values


def _config(
    arguments: argparse.Namespace, num_layers: int, num_stages: int, num_micro_batches: int
) -> DynamicPipelineConfig:
    """The section of --config with the options laid over it, checked by the section's own rules."""
    file = reading.json_object(arguments.config)
    with usage(f"{arguments.config}: "):  # what is wrong there is said of the file alone
        parse_config(file)
    given = {key: getattr(arguments, key) for key in _OF_THE_SECTION if getattr(arguments, key) is not None}
    config = parse_config({SECTION: {**file.get(SECTION, {}), **given, "enabled": True}})
    check_against_model(
        config, num_layers=num_layers, num_stages=num_stages, num_micro_batches=num_micro_batches
    )
    return config


@dataclass(frozen=True)
class _Row:
    """A partition that is run in an order, which may be 1F1B although it was planned."""

    partitioner: str
    boundaries: tuple[int, ...]
    order: str
    outcome: Simulation
    is_1f1b: bool


class _Case:
    """One profile, its constraints, and the questions asked about it."""

    def __init__(
        self, profile: PipelineProfile, num_stages: int, config: DynamicPipelineConfig, arguments: argparse.Namespace
    ) -> None:
        self.profile, self.num_stages, self.config = profile, num_stages, config
        self.partitioner, self.cost = config.partitioner or "optimal", config.cost or "time"
        self.costs = profile.costs(self.cost)
        self.has_times = any(profile.costs("time"))
        if not any(self.costs):
            by_time = "measure it with 'dynpipe profile', or balance --cost parameters"
            remedy = by_time if self.cost == "time" else "balance --cost time"
            raise ValueError(f"the profile has no {self.cost} at all; {remedy}")
        self.links: dict[str, Any] = {
            "activation_link_s": links_s(profile, num_stages, arguments.activation_link_s),
            "gradient_link_s": links_s(profile, num_stages, arguments.gradient_link_s),
        }
        self.memory = _memory(profile, config)
        self.has_halves = reading.has_halves(profile)
        self.weight_share = arguments.weight_share
        self.schedule = config.schedule
        self.plans_orders = self.has_times and (
            self.schedule == "planned" or (self.schedule == "auto" and self.has_halves)
        )
        self.current = profile.boundaries if len(profile.boundaries) == num_stages + 1 else None
        if arguments.current is not None:
            self.current = reading.partition(arguments.current, len(profile.layers), num_stages)

    # -- partitions and orders ----------------------------------------------------------------

    def _cut(self, partitioner: str) -> tuple[int, ...]:
        config, links = self.config, self.links if self.cost == "time" else {}  # they are in seconds
        return run_partitioner(
            get_partitioner(partitioner), self.costs, self.num_stages, profile=self.profile, **links,
            current=self.current, layer_bytes=self.profile.moved_bytes(),
            memory=self.memory if config.memory_cap_bytes is not None else None, pinned=config.pinned_cuts,
            speeds=config.stage_speeds, allow_empty=config.allow_empty_stages,
        ).boundaries

    def _workload(self, boundaries: Sequence[int]) -> Workload:
        return Workload.from_profile(self.profile, boundaries, speeds=self.config.stage_speeds, **self.links)

    def _rows(self) -> tuple[list[_Row], list[dict[str, Any]]]:
        """All partitions under 1F1B, each followed by its planned order, and why others have none."""
        chosen = self._cut(self.partitioner)
        cuts, refused = {self.partitioner: chosen}, []
        for name in partitioner_names():
            try:
                cuts.setdefault(name, chosen if name == self.partitioner else self._cut(name))
            except ValueError as error:
                refused.append({"partitioner": name, "order": "1F1B", "error": " ".join(str(error).split())})
        if self.current is not None:
            cuts[_PRESENT] = self.current
        rows: list[_Row] = []
        worker_bytes = self._worker_bytes(chosen)
        run_by = cache(partial(self._run_by, worker_bytes=worker_bytes))  # partitioners often agree
        for name, cut in cuts.items():
            for order in ("1F1B", "planned") if self.plans_orders else ("1F1B",):
                try:
                    rows.append(_Row(name, cut, order, *run_by(cut, order)))
                except ValueError as error:
                    refused.append({"partitioner": name, "order": order, "error": str(error)})
        if self.plans_orders:
            rows.append(self._together([*([self.current] if self.current else []), *cuts.values()], worker_bytes))
        return rows, refused

    def _run_by(
        self, cut: tuple[int, ...], order: str, *, worker_bytes: int | Sequence[int]
    ) -> tuple[Simulation, bool]:
        """A batch, and whether it ran in 1F1B."""
        if order == "1F1B":
            return simulate(self._workload(cut)), True
        planned = plan_on_partition(
            self.profile, cut, worker_bytes, speeds=self.config.stage_speeds, **self.links
        )
        return planned.simulation, planned.is_1f1b

    def _together(self, candidates: Sequence[Sequence[int]], worker_bytes: int | Sequence[int]) -> _Row:
        """The best partition and order."""
        best = plan_batch(
            self.profile, candidates, worker_bytes=worker_bytes, speeds=self.config.stage_speeds,
            pinned=self.config.pinned_cuts, allow_empty=self.config.allow_empty_stages, **self.links,
        )
        is_1f1b = best.planned.is_1f1b
        order = "1F1B" if is_1f1b else "planned"
        return _Row(_TOGETHER, best.placement.boundaries, order, best.planned.simulation, is_1f1b)

    def _worker_bytes(self, chosen: Sequence[int]) -> int | Sequence[int]:
        """As in training: the cap, and what 1F1B needs at most on the present or the chosen partition."""
        budget, given = self.config.activation_budget, self.config.memory_cap_bytes
        most = worker_bytes_of_1f1b(self.profile, self.current or chosen, activation_budget=budget)
        if isinstance(given, list):
            return [min(most, cap) for cap in given]
        return most if given is None else min(most, given)

    # -- what they promise --------------------------------------------------------------------

    def values(self) -> dict[str, Any]:
        """What is chosen, and all that it is compared with."""
        rows, refused = self._rows()
        best = rows[-1] if self.plans_orders else rows[0]
        bottleneck, speeds = self._bottleneck(best.boundaries), self.config.stage_speeds or [1.0] * self.num_stages
        return {
            "boundaries": list(best.boundaries), "partitioner": best.partitioner, "cost": self.cost,
            "order": best.order, "num_micro_batches": self.profile.num_micro_batches,
            "batch_s": best.outcome.makespan_s, "bubble_ratio": best.outcome.bubble_ratio, "bottleneck": bottleneck,
            # How far the slowest stage is above a perfect balance that could cut inside layers.
            "imbalance": bottleneck * sum(speeds) / sum(self.costs) - 1.0,
            "stages": self._stages(best), "current": self._present(rows, best), "weight_share": self.weight_share,
            "finer_batch_s": self._finer_batch_s(best),
            "compared": [*map(self._compared, rows), *refused],
        }  # fmt: skip

    def _bottleneck(self, boundaries: Sequence[int]) -> float:
        speeds = self.config.stage_speeds or [1.0] * self.num_stages
        return max(fsum(self.costs[a:b]) / speed for (a, b), speed in zip(pairwise(boundaries), speeds, strict=True))

    def _present(self, rows: Sequence[_Row], best: _Row) -> dict[str, Any] | None:
        """The present partition under 1F1B, and what changing to the best would bring."""
        present = next((row for row in rows if row.partitioner == _PRESENT), None)
        if present is None:
            return None
        both = (present, best)
        old, new = (r.outcome.makespan_s if self.has_times else self._bottleneck(r.boundaries) for r in both)
        moved_bytes = self.profile.moved_bytes()
        moves = plan_moves(present.boundaries, best.boundaries)
        return {
            "boundaries": list(present.boundaries), "batch_s": present.outcome.makespan_s,
            "bubble_ratio": present.outcome.bubble_ratio, "predicted_gain": 1.0 - new / old,
            "bytes_to_move": sum(moved_bytes[move.layer] for move in moves),
        }  # fmt: skip

    def _finer_batch_s(self, best: _Row) -> float | None:
        """Seconds of a batch if the layers that repeat were two equal halves each; ``None`` where that is not known."""
        profile = self.profile
        if not self.has_times or self.num_stages == 1 or self.config.pinned_cuts or finer.repeated(profile) is None:
            return None
        other = copy(self)
        other.profile, other.current = finer.halved(profile), None
        other.costs, other.memory = other.profile.costs(self.cost), _memory(other.profile, self.config)
        try:
            cuts = other._cut(self.partitioner)
            if self.plans_orders:
                return other._together([cuts], self._worker_bytes(best.boundaries)).outcome.makespan_s
        except ValueError:  # a partitioner of the user's, or one without room, need not say why
            return None
        return simulate(other._workload(cuts)).makespan_s

    def _peak_bytes(self, row: _Row) -> list[int]:
        state = (sum(held) for held in Placement.of(row.boundaries).by_stage(self.memory.state_bytes))
        return [held + stage.peak_activation_bytes for held, stage in zip(state, row.outcome.stages, strict=True)]

    def _stages(self, row: _Row) -> list[dict[str, Any]]:
        memory, layers = self.memory, self.profile.layers
        caps = [None] * self.num_stages if self.config.memory_cap_bytes is None else memory.caps(self.num_stages)
        peaks = self._peak_bytes(row)
        stages = []
        for stage, (low, high) in enumerate(pairwise(row.boundaries)):
            outcome = row.outcome.stages[stage]
            stages.append({
                "stage": stage, "first_layer": low, "last_layer": high - 1, "num_layers": high - low,
                "forward_s": sum(layer.forward_s for layer in layers[low:high]),
                "backward_s": sum(layer.backward_s for layer in layers[low:high]),
                "busy_s": outcome.busy_s, "bubble_ratio": outcome.bubble_ratio,
                "state_bytes": sum(memory.state_bytes[low:high]), "activation_bytes": outcome.peak_activation_bytes,
                "micro_batches_in_flight": outcome.peak_micro_batches, "peak_bytes": peaks[stage],
                "cap_bytes": caps[stage],
            })  # fmt: skip
        return stages

    def _compared(self, row: _Row) -> dict[str, Any]:
        return {
            "partitioner": row.partitioner, "order": row.order, "is_1f1b": row.is_1f1b,
            "boundaries": list(row.boundaries),
            "batch_s": row.outcome.makespan_s if self.has_times else None,
            "bubble_ratio": row.outcome.bubble_ratio if self.has_times else None,
            "peak_bytes": max(self._peak_bytes(row)),
        }  # fmt: skip


def _memory(profile: PipelineProfile, config: DynamicPipelineConfig) -> StageMemory:
    return StageMemory(
        state_bytes=profile.state_bytes(), activation_bytes=profile.activation_bytes(),
        num_micro_batches=profile.num_micro_batches, cap_bytes=config.memory_cap_bytes or 0,
    )


def _text(case: _Case, values: Mapping[str, Any]) -> str:
    above = f"the slowest stage is {values['imbalance']:.1%} above a perfect balance"
    times = f"{_batch(values)}; {above}" if case.has_times else f"{show.UNKNOWN}: the profile has no times; {above}"
    by = f"by {values['partitioner']}:{values['cost']}"
    parts = [
        f"partition   {show.brackets(values['boundaries'])}   {'' if values['partitioner'] == _TOGETHER else f'{by}, '}"
        f"{len(case.profile.layers)} layers, {case.num_stages} stages, {values['num_micro_batches']} micro-batches",
        f"order       {values['order']}{', chosen with the partition' if values['partitioner'] == _TOGETHER else ''}",
        f"a batch     {times}",
    ]
    if (current := values["current"]) is not None:
        parts.append(f"now         {show.brackets(current['boundaries'])}   {_change(case, values, current)}")
    finer_s = values["finer_batch_s"]
    if finer_s is not None and finer_s <= (1 - finer.LEAST_GAIN) * values["batch_s"]:
        parts.append(
            f"finer       with every {finer.repeated(case.profile)} in two equal halves a batch would take "
            f"{show.milliseconds(finer_s)} ms, {1 - finer_s / values['batch_s']:.1%} less: docs/finer_layers.md"
        )
    parts += ["", _stage_table(values["stages"]), "", _compared_table(values["compared"])]
    parts += [line for note in _notes(case) for line in ("", note)]
    return "\n".join(parts)


def _change(case: _Case, values: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """What changing from the present partition under 1F1B brings."""
    is_same = current["boundaries"] == values["boundaries"]
    what = "a batch" if case.has_times else "the slowest stage"
    moving = f"this shortens {what} by {current['predicted_gain']:.1%}"
    moving += ", without moving a layer" if is_same else f" and moves {show.mebibytes(current['bytes_to_move'])} MiB"
    gain = "the same partition" if is_same and values["order"] == "1F1B" else moving
    return f"{_batch(current)} under 1F1B; {gain}" if case.has_times else gain


def _notes(case: _Case) -> list[str]:
    """What is assumed, or not known, of planned orders."""
    if case.plans_orders:
        return [show.assumed(case.weight_share)] if case.weight_share is not None else []
    if case.schedule == "auto" and case.has_times:
        return [show.NO_HALVES]
    return []


def _batch(values: Mapping[str, Any]) -> str:
    return f"{show.milliseconds(values['batch_s'])} ms, bubble {values['bubble_ratio']:.1%}"


def _stage_table(stages: Sequence[Mapping[str, Any]]) -> str:
    columns = _COLUMNS if stages[0]["cap_bytes"] is None else {**_COLUMNS, "cap MiB": "cap_bytes"}
    spans = [f"{stage['first_layer']}-{stage['last_layer']}" if stage["num_layers"] else "none" for stage in stages]
    return show.table(columns, ({**stage, "layers": span} for stage, span in zip(stages, spans, strict=True)))


def _compared_table(compared: Sequence[Mapping[str, Any]]) -> str:
    """All rows but those of planned orders that are 1F1B after all: they would repeat the row above."""
    rows: list[Mapping[str, Any]] = []
    notes: list[str] = []
    repeated = [row for row in compared if row["order"] == "planned" and row.get("is_1f1b")]
    for row in (row for row in compared if row not in repeated):
        if "error" in row:
            notes.append(f"({len(notes) + 1}) {row['error']}")
        rows.append({**row, "partition": f"({len(notes)})" if "error" in row else show.brackets(row["boundaries"])})
    if repeated:
        notes.append(f"the planned order is 1F1B: {', '.join(row['partitioner'] for row in repeated)}")
    return "\n".join([show.table(_COMPARED_COLUMNS, rows), *notes])
