"""``dynpipe plan``: from layer times to stage boundaries, with what they promise."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dynpipe_ds.cli import reading, show
from dynpipe_ds.cli.command import OK, ProblemError, Result, UsageError, add_command, usage, users_code
from dynpipe_ds.config import SECTION, DynamicPipelineConfig, check_against_model, parse_config
from dynpipe_ds.decide.methods import COSTS
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition import (
    InfeasiblePartitionError,
    Plan,
    StageMemory,
    get_partitioner,
    partitioner_names,
    run_partitioner,
)
from dynpipe_ds.placement import Placement
from dynpipe_ds.planning import (
    PlannedBatch,
    activation_caps,
    assume_halves,
    plan_batch,
    plan_order,
    worker_bytes_of_1f1b,
)
from dynpipe_ds.simulation import Simulation, Workload, simulate

_OF_THE_SECTION = ("partitioner", "cost", "memory_cap_bytes", "pinned_cuts", "stage_speeds", "allow_empty_stages")
_COLUMNS = {
    "stage": "stage", "layers": "layers", "forward ms": "forward_s", "backward ms": "backward_s",
    "idle": "bubble_ratio", "state MiB": "state_bytes", "in flight": "micro_batches_in_flight",
    "activations MiB": "activation_bytes", "peak MiB": "peak_bytes",
}  # fmt: skip
_OTHER_COLUMNS = {
    "partitioner": "partitioner", "order": "order", "batch ms": "batch_s", "bubble": "bubble_ratio",
    "largest peak MiB": "peak_bytes", "partition": "partition",
}  # fmt: skip


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "plan", run)
    known = f"{', '.join(partitioner_names())} or one of --import (default optimal)"
    parser.option("--stages", "N", "number of stages (default: the profile's)", reading.whole(1))
    parser.option("--partitioner", "NAME", known)
    parser.add_argument("--cost", choices=COSTS, help="what to balance (default time)")
    cap = "most a stage may hold: 16GiB, or 16GiB,8GiB,... by stage"
    parser.option("--memory-cap-bytes", "SIZE", cap, reading.one_or_each(reading.num_bytes))
    whole_numbers, numbers = reading.listed(int, "whole numbers"), reading.listed(float, "numbers")
    parser.option("--pinned-cuts", "C,...", "c keeps layers c-1 and c on one stage", whole_numbers)
    parser.option("--stage-speeds", "V,...", "relative speed of every stage's worker", numbers)
    parser.flag("--allow-empty-stages", "a stage may have no layer", default=None)
    parser.option("--config", "FILE", f'DeepSpeed JSON whose "{SECTION}" section has these settings')
    parser.option("--current", "PARTITION", "boundaries now in use, to compare with (default: the profile's)")
    parser.flag("--compare", "also show what the other partitioners would choose, and planned orders")
    reading.add_planned(parser)
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="import it first: it may call register_partitioner",
    )
    reading.add_simulated(parser)


def run(arguments: argparse.Namespace) -> Result:
    """Choose stage boundaries for a profile.

    Prints the partition, the simulated time and bubble of a batch under 1F1B, and what every stage holds at its peak.
    Layer times are taken as those of a worker of speed 1. Options named as a key of the "dynamic_pipeline" section
    mean the same; --config takes them from a DeepSpeed JSON, and options given here win. With --compare each partition
    is shown under 1F1B and under an order that is planned for it: backwards in two parts, in the same memory. The row
    "together" has the best partition and order.

    Examples:
      dynpipe plan profile.json --stages 4
      dynpipe plan profile.json --stages 4 --memory-cap-bytes 16GiB --compare
      dynpipe plan profile.json --stages 2 --partitioner diffusion --stage-speeds 1,0.5 --pinned-cuts 1
      dynpipe plan profile.json --stages 2 --config ds_config.json --json
    """
    for module in arguments.imports:
        where = f"--import {module}"
        with users_code(f"{where}: can't be imported:"), usage(f"{where}: "):  # register_partitioner's own complaint
            reading.module(module, where=where, remedy="give a module that Python finds from the current folder")
    profile = reading.profile(arguments.profile, arguments.micro_batches)
    num_stages = arguments.stages or len(profile.boundaries) - 1
    if num_stages < 1:
        raise UsageError(f"{arguments.profile} has no partition of its own; give the number of stages by --stages")
    with usage():
        try:
            case = _Case(profile, num_stages, _config(arguments, len(profile.layers), num_stages), arguments)
            values = case.values(compare=arguments.compare)
        except InfeasiblePartitionError as error:
            raise ProblemError(str(error)) from error
    return OK, _text(case, values), values


def _config(arguments: argparse.Namespace, num_layers: int, num_stages: int) -> DynamicPipelineConfig:
    """The section of --config with the options laid over it, checked by the section's own rules."""
    file = reading.json_object(arguments.config)
    with usage(f"{arguments.config}: "):  # what is wrong there is said of the file alone
        parse_config(file)
    given = {key: getattr(arguments, key) for key in _OF_THE_SECTION if getattr(arguments, key) is not None}
    config = parse_config({SECTION: {**file.get(SECTION, {}), **given, "enabled": True}})
    check_against_model(config, num_layers=num_layers, num_stages=num_stages)
    return config


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
        self.links = {"activation_link_s": arguments.activation_link_s, "gradient_link_s": arguments.gradient_link_s}
        self.memory = StageMemory(
            state_bytes=profile.state_bytes(), activation_bytes=profile.activation_bytes(),
            num_micro_batches=profile.num_micro_batches, cap_bytes=config.memory_cap_bytes or 0,
        )
        self.weight_share = arguments.weight_share
        self.halves = assume_halves(profile, self.weight_share)
        self.chosen: Sequence[int] = ()
        self.current = profile.boundaries if len(profile.boundaries) == num_stages + 1 else None
        if arguments.current is not None:
            self.current = reading.partition(arguments.current, len(profile.layers), num_stages)

    def _plan(self, partitioner: str) -> Plan:
        config, links = self.config, self.links if self.cost == "time" else {}  # they are in seconds
        return run_partitioner(
            get_partitioner(partitioner), self.costs, self.num_stages, profile=self.profile, **links,
            current=self.current, layer_bytes=self.profile.moved_bytes(),
            memory=self.memory if config.memory_cap_bytes is not None else None, pinned=config.pinned_cuts,
            speeds=config.stage_speeds, allow_empty=config.allow_empty_stages,
        )

    def _planned(self, boundaries: Sequence[int]) -> dict[str, Any]:
        """Figures of the order planned for a partition."""
        workload = Workload.from_profile(
            self.halves, boundaries, speeds=self.config.stage_speeds, **self.links
        )
        caps = activation_caps(self.profile, boundaries, self._worker_bytes())
        return self._figures(PlannedBatch(Placement.of(boundaries), plan_order(workload, caps)))

    def _together(self, candidates: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Figures of the best partition and order."""
        best = plan_batch(
            self.halves, candidates, worker_bytes=self._worker_bytes(), speeds=self.config.stage_speeds,
            pinned=self.config.pinned_cuts,
            allow_empty=self.config.allow_empty_stages, **self.links,
        )
        return {"partitioner": "together", **self._figures(best)}

    def _figures(self, found: PlannedBatch) -> dict[str, Any]:
        state = (sum(held) for held in found.placement.by_stage(self.memory.state_bytes))
        peaks = [held + activations for held, activations in zip(state, found.planned.peak_bytes, strict=True)]
        return {
            "boundaries": list(found.placement.boundaries), "order": "1F1B" if found.planned.is_1f1b else "planned",
            "batch_s": found.seconds, "bubble_ratio": found.planned.simulation.bubble_ratio, "peak_bytes": max(peaks),
        }  # fmt: skip

    def _worker_bytes(self) -> int | Sequence[int]:
        """The cap, or what the fullest stage holds under 1F1B on the present partition, or else on the chosen one."""
        if self.config.memory_cap_bytes is not None:
            return self.config.memory_cap_bytes
        return worker_bytes_of_1f1b(self.profile, self.current or self.chosen)

    def _simulated(self, boundaries: Sequence[int]) -> Simulation:
        workload = Workload.from_profile(self.profile, boundaries, speeds=self.config.stage_speeds, **self.links)
        return simulate(workload)

    def values(self, *, compare: bool) -> dict[str, Any]:
        """What the partitioner that was asked chooses, and, to compare, all others."""
        chosen = self._plan(self.partitioner)
        self.chosen = chosen.boundaries
        outcome = self._simulated(chosen.boundaries)
        speeds = self.config.stage_speeds or [1.0] * self.num_stages
        values: dict[str, Any] = {
            "boundaries": list(chosen.boundaries), "partitioner": self.partitioner, "cost": self.cost,
            "num_micro_batches": self.profile.num_micro_batches,
            "batch_s": outcome.makespan_s, "bubble_ratio": outcome.bubble_ratio, "bottleneck": chosen.bottleneck,
            # How far the slowest stage is above a perfect balance that could cut inside layers.
            "imbalance": chosen.bottleneck * sum(speeds) / sum(self.costs) - 1.0,
            "stages": self._stages(chosen, outcome), "current": None,
        }  # fmt: skip
        if self.current is not None:
            present = self._simulated(self.current)
            values["current"] = {
                "boundaries": list(self.current), "batch_s": present.makespan_s, "bubble_ratio": present.bubble_ratio,
                "predicted_gain": chosen.predicted_gain, "bytes_to_move": chosen.bytes_to_move,
            }  # fmt: skip
        if compare:
            others = (name for name in partitioner_names() if name != self.partitioner)
            rows = [self._compared(self.partitioner, chosen), *map(self._compared, others)]
            values |= {"others": rows, "weight_share": self.weight_share, "together": None}
            if self.has_times:
                candidates = [row["boundaries"] for row in rows if "boundaries" in row]
                values["together"] = self._together([self.current] * (self.current is not None) + candidates)
        return values

    def _stages(self, chosen: Plan, outcome: Simulation) -> list[dict[str, Any]]:
        memory, layers = self.memory, self.profile.layers
        caps = [None] * self.num_stages if self.config.memory_cap_bytes is None else memory.caps(self.num_stages)
        peaks = memory.stage_bytes(chosen.boundaries)
        stages = []
        for stage, (low, high) in enumerate(pairwise(chosen.boundaries)):
            in_flight = memory.in_flight(stage, self.num_stages)
            stages.append({
                "stage": stage, "first_layer": low, "last_layer": high - 1, "num_layers": high - low,
                "forward_s": sum(layer.forward_s for layer in layers[low:high]),
                "backward_s": sum(layer.backward_s for layer in layers[low:high]),
                "busy_s": outcome.stages[stage].busy_s, "bubble_ratio": outcome.stages[stage].bubble_ratio,
                "state_bytes": sum(memory.state_bytes[low:high]),
                "activation_bytes": sum(memory.activation_bytes[low:high]) * in_flight,
                "micro_batches_in_flight": in_flight, "peak_bytes": peaks[stage], "cap_bytes": caps[stage],
            })  # fmt: skip
        return stages

    def _compared(self, partitioner: str, plan: Plan | None = None) -> dict[str, Any]:
        try:
            plan = plan or self._plan(partitioner)
        except ValueError as error:
            return {"partitioner": partitioner, "error": " ".join(str(error).split())}
        outcome = self._simulated(plan.boundaries)
        return {
            "partitioner": partitioner, "boundaries": list(plan.boundaries), "batch_s": outcome.makespan_s,
            "bubble_ratio": outcome.bubble_ratio, "bottleneck": plan.bottleneck,
            "peak_bytes": max(self.memory.stage_bytes(plan.boundaries)),
            "planned": self._planned(plan.boundaries) if self.has_times else None,
        }  # fmt: skip


def _text(case: _Case, values: Mapping[str, Any]) -> str:
    above = f"the slowest stage is {values['imbalance']:.1%} above a perfect balance"
    times = f"{_batch(values)}; {above}" if case.has_times else f"{show.UNKNOWN}: the profile has no times; {above}"
    parts = [
        f"partition   {show.brackets(values['boundaries'])}   by {values['partitioner']}:{values['cost']}, "
        f"{len(case.profile.layers)} layers, {case.num_stages} stages, {values['num_micro_batches']} micro-batches",
        f"a batch     {times}",
    ]
    if (current := values["current"]) is not None:
        times = f"{_batch(current)}; " if case.has_times else ""
        moving = (
            f"moving shrinks the slowest stage by {current['predicted_gain']:.1%} and takes "
            f"{show.mebibytes(current['bytes_to_move'])} MiB"
        )
        gain = "the same partition" if current["boundaries"] == values["boundaries"] else moving
        parts.append(f"now         {show.brackets(current['boundaries'])}   {times}{gain}")
    parts += ["", _stage_table(values["stages"])]
    if "others" in values:
        parts += ["", _other_table(case, values["others"], values["together"])]
        if case.has_times:
            parts += ["", *show.planned(case.weight_share)]
    return "\n".join(parts)


def _batch(values: Mapping[str, Any]) -> str:
    return f"{show.milliseconds(values['batch_s'])} ms, bubble {values['bubble_ratio']:.1%}"


def _stage_table(stages: Sequence[Mapping[str, Any]]) -> str:
    columns = _COLUMNS if stages[0]["cap_bytes"] is None else {**_COLUMNS, "cap MiB": "cap_bytes"}
    spans = [f"{stage['first_layer']}-{stage['last_layer']}" if stage["num_layers"] else "none" for stage in stages]
    return show.table(columns, ({**stage, "layers": span} for stage, span in zip(stages, spans, strict=True)))


def _other_table(
    case: _Case, others: Sequence[Mapping[str, Any]], together: Mapping[str, Any] | None
) -> str:
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for other in others:
        if "error" in other:
            notes.append(f"({len(notes) + 1}) {other['error']}")
            rows.append({**other, "partition": f"({len(notes)})"})
            continue
        unknown = {} if case.has_times else {"batch_s": None, "bubble_ratio": None}
        rows.append({**other, "order": "1F1B", **unknown})
        if other["planned"] is not None:
            rows.append({**other["planned"], "partitioner": other["partitioner"]})
    rows += [dict(together)] if together else []
    shown = [{"partition": show.brackets(row["boundaries"]), **row} if "boundaries" in row else row for row in rows]
    return "\n".join([show.table(_OTHER_COLUMNS, shown), *notes])
