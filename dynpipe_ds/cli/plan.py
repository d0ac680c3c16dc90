"""``dynpipe plan``: from layer times to stage boundaries, with what they promise."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from dynpipe_ds.cli.command import (
    OK,
    ProblemError,
    Result,
    UsageError,
    add_command,
    add_links,
    add_profile,
    boundaries_of,
    brackets,
    listed_problems,
    load_json,
    load_profile,
    mebibytes,
    milliseconds,
    percent,
    sizes,
    whole,
)
from dynpipe_ds.config import SECTION, DynamicPipelineConfig, check_against_model, parse_config
from dynpipe_ds.decide.methods import COSTS
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition import (
    InfeasiblePartitionError,
    Plan,
    StageMemory,
    check_boundaries,
    get_partitioner,
    partitioner_names,
    run_partitioner,
)
from dynpipe_ds.reporting import format_table
from dynpipe_ds.simulation import Simulation, Workload, simulate

_UNKNOWN = "n/a"

_MORE = """
Prints the partition, the simulated time and bubble of a batch under 1F1B, and what every stage holds at its peak.
Layer times are taken as those of a worker of speed 1. Options named as a key of the "dynamic_pipeline" section mean
the same; --config takes them from a DeepSpeed JSON, and options given here win.
"""
_EXAMPLES = """
dynpipe plan profile.json --stages 4
dynpipe plan profile.json --stages 4 --memory-cap-bytes 16GiB --compare
dynpipe plan profile.json --stages 2 --partitioner diffusion --stage-speeds 1,0.5 --pinned-cuts 1
dynpipe plan profile.json --stages 2 --config ds_config.json --json
"""


def add_parser(commands: Any) -> None:
    """Add the command.

    Args:
        commands: what ``add_subparsers`` returned.
    """
    parser = add_command(
        commands, "plan", run, what="choose stage boundaries for a profile", more=_MORE, examples=_EXAMPLES
    )
    add_profile(parser)
    parser.add_argument("--stages", type=whole(1), metavar="N", help="number of stages (default: the profile's)")
    parser.add_argument(
        "--partitioner", metavar="NAME", help=f"{', '.join(partitioner_names())} or one of --import (default optimal)"
    )
    parser.add_argument("--cost", choices=COSTS, help="what to balance (default time)")
    parser.add_argument(
        "--memory-cap-bytes", type=sizes, metavar="SIZE",
        help="most a stage may hold: 16GiB, or 16GiB,8GiB,... by stage",
    )
    parser.add_argument("--pinned-cuts", metavar="C,...", help="c keeps layers c-1 and c on one stage")
    parser.add_argument("--stage-speeds", metavar="V,...", help="relative speed of every stage's worker")
    parser.add_argument("--allow-empty-stages", action="store_true", default=None, help="a stage may have no layer")
    parser.add_argument("--config", metavar="FILE", help=f'DeepSpeed JSON whose "{SECTION}" section has these settings')
    parser.add_argument(
        "--current", metavar="PARTITION", help="boundaries now in use, to compare with (default: the profile's)"
    )
    parser.add_argument("--compare", action="store_true", help="also show what the other partitioners would choose")
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="import it first: it may call register_partitioner",
    )
    add_links(parser)


def run(arguments: argparse.Namespace) -> Result:
    """Carry out the command.

    Args:
        arguments: as parsed.

    Raises:
        UsageError: for a value that can't be used.
        ProblemError: when no partition satisfies the constraints.
    """
    _import(arguments.imports)
    profile = load_profile(arguments.profile, arguments.micro_batches)
    num_stages = arguments.stages or len(profile.boundaries) - 1
    if num_stages < 1:
        raise UsageError(f"{arguments.profile} has no partition of its own; give the number of stages by --stages")
    try:
        config = _config(arguments, len(profile.layers), num_stages)
        case = _Case(profile, num_stages, config, arguments)
        chosen = case.plan(config.partitioner or "optimal")
        outcome = case.outcome(chosen.boundaries)
        others = case.others(chosen) if arguments.compare else []
        present = None if case.current is None else case.outcome(case.current)
    except InfeasiblePartitionError as error:
        raise ProblemError(str(error)) from error
    except ValueError as error:
        raise UsageError("; ".join(listed_problems(error))) from error
    values = _values(case, chosen, outcome, present)
    if arguments.compare:
        values["others"] = others
    return OK, _text(case, values, others), values


def _import(modules: Sequence[str]) -> None:
    sys.path.insert(0, "")
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(
                f"--import {module}: {error}; give a module that Python finds from the current folder"
            ) from error
        except ValueError as error:  # register_partitioner's own complaint
            raise UsageError(f"--import {module}: {error}") from error
        except Exception as error:
            raise ProblemError(f"--import {module}: can't be imported: {type(error).__name__}: {error}") from error


def _config(arguments: argparse.Namespace, num_layers: int, num_stages: int) -> DynamicPipelineConfig:
    """The section of --config with the options laid over it, checked by the section's own rules."""
    section: dict[str, Any] = {}
    if arguments.config is not None:
        file = load_json(arguments.config, "a DeepSpeed JSON")
        try:
            parse_config(file)  # what is wrong there is said of the file alone
        except ValueError as error:
            raise UsageError(f"{arguments.config}: {'; '.join(listed_problems(error))}") from error
        section = dict(file.get(SECTION, {}))
    given = {
        "partitioner": arguments.partitioner,
        "cost": arguments.cost,
        "memory_cap_bytes": arguments.memory_cap_bytes,
        "pinned_cuts": _numbers("--pinned-cuts", arguments.pinned_cuts, int),
        "stage_speeds": _numbers("--stage-speeds", arguments.stage_speeds, float),
        "allow_empty_stages": arguments.allow_empty_stages,
    }
    section |= {key: value for key, value in given.items() if value is not None} | {"enabled": True}
    config = parse_config({SECTION: section})
    get_partitioner(config.partitioner or "optimal")
    check_against_model(config, num_layers=num_layers, num_stages=num_stages)
    return config


def _numbers(option: str, text: str | None, read: type[int] | type[float]) -> list[Any] | None:
    if text is None:
        return None
    try:
        return [read(part) for part in text.split(",")]
    except ValueError:
        kind = "whole numbers" if read is int else "numbers"
        raise UsageError(f"{option} {text!r}: must be {kind} with commas between them, such as 1,2") from None


class _Case:
    """One profile, its constraints, and the questions asked about it."""

    def __init__(
        self, profile: PipelineProfile, num_stages: int, config: DynamicPipelineConfig, arguments: argparse.Namespace
    ) -> None:
        self.profile, self.num_stages, self.config = profile, num_stages, config
        self.cost = config.cost or "time"
        self.costs = profile.costs(self.cost)
        self.has_times = any(profile.costs("time"))
        if not any(self.costs):
            raise ValueError(
                f"the profile has no {self.cost} at all; "
                + ("measure it with 'dynpipe profile', or balance --cost parameters" if self.cost == "time" else
                   "balance --cost time")
            )  # fmt: skip
        self.links = {"activation_link_s": arguments.activation_link_s, "gradient_link_s": arguments.gradient_link_s}
        self.memory = StageMemory(
            state_bytes=profile.state_bytes(), activation_bytes=profile.activation_bytes(),
            num_micro_batches=profile.num_micro_batches, cap_bytes=config.memory_cap_bytes or 0,
        )
        self.current = self._current(arguments.current)

    def _current(self, given: str | None) -> tuple[int, ...] | None:
        if given is None:
            return self.profile.boundaries if len(self.profile.boundaries) == self.num_stages + 1 else None
        return check_boundaries(
            boundaries_of(given), num_layers=len(self.profile.layers), num_stages=self.num_stages, allow_empty=True
        )

    def plan(self, partitioner: str) -> Plan:
        """What a partitioner chooses."""
        config, links = self.config, self.links if self.cost == "time" else {}  # they are in seconds
        return run_partitioner(
            get_partitioner(partitioner), self.costs, self.num_stages, profile=self.profile, **links,
            current=self.current, layer_bytes=self.profile.moved_bytes(),
            memory=self.memory if config.memory_cap_bytes is not None else None, pinned=config.pinned_cuts,
            speeds=config.stage_speeds, allow_empty=config.allow_empty_stages,
        )

    def outcome(self, boundaries: Sequence[int]) -> Simulation:
        """What a batch would take."""
        workload = Workload.from_profile(self.profile, boundaries, speeds=self.config.stage_speeds, **self.links)
        return simulate(workload)

    def others(self, chosen: Plan) -> list[dict[str, Any]]:
        """What all partitioners choose, the one that was asked first."""
        rows: list[dict[str, Any]] = []
        asked = self.config.partitioner or "optimal"
        for name in [asked, *(name for name in partitioner_names() if name != asked)]:
            try:
                plan = chosen if name == asked else self.plan(name)
            except ValueError as error:
                rows.append({"partitioner": name, "error": " ".join(str(error).split())})
                continue
            outcome = self.outcome(plan.boundaries)
            rows.append({
                "partitioner": name, "boundaries": list(plan.boundaries), "batch_s": outcome.makespan_s,
                "bubble_ratio": outcome.bubble_ratio, "bottleneck": plan.bottleneck,
                "peak_bytes": max(self.memory.stage_bytes(plan.boundaries)),
            })  # fmt: skip
        return rows


def _values(case: _Case, chosen: Plan, outcome: Simulation, present: Simulation | None) -> dict[str, Any]:
    caps = case.config.memory_cap_bytes
    by_stage = [None] * case.num_stages if caps is None else case.memory.caps(case.num_stages)
    state, activation = case.memory.state_bytes, case.memory.activation_bytes
    stages = [
        {
            "stage": stage, "first_layer": low, "last_layer": high - 1, "num_layers": high - low,
            "forward_s": sum(layer.forward_s for layer in case.profile.layers[low:high]),
            "backward_s": sum(layer.backward_s for layer in case.profile.layers[low:high]),
            "busy_s": outcome.stages[stage].busy_s, "bubble_ratio": outcome.stages[stage].bubble_ratio,
            "state_bytes": sum(state[low:high]),
            "activation_bytes": sum(activation[low:high]) * case.memory.in_flight(stage, case.num_stages),
            "micro_batches_in_flight": case.memory.in_flight(stage, case.num_stages),
            "peak_bytes": case.memory.stage_bytes(chosen.boundaries)[stage], "cap_bytes": by_stage[stage],
        }
        for stage, (low, high) in enumerate(pairwise(chosen.boundaries))
    ]  # fmt: skip
    return {
        "boundaries": list(chosen.boundaries),
        "partitioner": case.config.partitioner or "optimal", "cost": case.cost,
        "num_micro_batches": case.profile.num_micro_batches,
        "batch_s": outcome.makespan_s, "bubble_ratio": outcome.bubble_ratio,
        "bottleneck": chosen.bottleneck, "imbalance": _imbalance(case, chosen),
        "stages": stages,
        "current": None if case.current is None or present is None else {
            "boundaries": list(case.current), "batch_s": present.makespan_s, "bubble_ratio": present.bubble_ratio,
            "predicted_gain": chosen.predicted_gain, "bytes_to_move": chosen.bytes_to_move,
        },
    }  # fmt: skip


def _imbalance(case: _Case, chosen: Plan) -> float:
    """How far the slowest stage is above a perfect balance that could cut inside layers."""
    speeds = case.config.stage_speeds or [1.0] * case.num_stages
    return chosen.bottleneck * sum(speeds) / sum(case.costs) - 1.0


def _text(case: _Case, values: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    parts = [
        f"partition   {brackets(values['boundaries'])}   by {values['partitioner']}:{values['cost']}, "
        f"{len(case.profile.layers)} layers, {case.num_stages} stages, {values['num_micro_batches']} micro-batches",
        _prediction(case, values),
    ]
    if values["current"] is not None:
        parts.append(_against(case, values))
    parts += ["", _stage_table(case, values)]
    if others:
        parts += ["", _other_table(case, others)]
    return "\n".join(parts)


def _prediction(case: _Case, values: Mapping[str, Any]) -> str:
    above = f"the slowest stage is {percent(values['imbalance'])} above a perfect balance"
    if not case.has_times:
        return f"a batch     {_UNKNOWN}: the profile has no times; {above}"
    return f"a batch     {milliseconds(values['batch_s'])} ms, bubble {percent(values['bubble_ratio'])}; {above}"


def _against(case: _Case, values: Mapping[str, Any]) -> str:
    current = values["current"]
    text = f"now         {brackets(current['boundaries'])}   "
    if case.has_times:
        text += f"{milliseconds(current['batch_s'])} ms, bubble {percent(current['bubble_ratio'])}; "
    if list(current["boundaries"]) == values["boundaries"]:
        return f"{text}the same partition"
    return (
        f"{text}moving shrinks the slowest stage by {percent(current['predicted_gain'])} and takes "
        f"{mebibytes(current['bytes_to_move'])} MiB"
    )


def _stage_table(case: _Case, values: Mapping[str, Any]) -> str:
    capped = case.config.memory_cap_bytes is not None
    head = ["stage", "layers", "forward ms", "backward ms", "idle", "state MiB", "in flight", "activations MiB"]
    rows = [[*head, "peak MiB", *(["cap MiB"] if capped else [])]]
    for stage in values["stages"]:
        layers = f"{stage['first_layer']}-{stage['last_layer']}" if stage["num_layers"] else "none"
        rows.append([
            str(stage["stage"]), layers, milliseconds(stage["forward_s"]), milliseconds(stage["backward_s"]),
            percent(stage["bubble_ratio"]), mebibytes(stage["state_bytes"]), str(stage["micro_batches_in_flight"]),
            mebibytes(stage["activation_bytes"]), mebibytes(stage["peak_bytes"]),
            *([mebibytes(stage["cap_bytes"])] if capped else []),
        ])  # fmt: skip
    return format_table(rows)


def _other_table(case: _Case, others: Sequence[Mapping[str, Any]]) -> str:
    rows = [["partitioner", "batch ms", "bubble", "largest peak MiB", "partition"]]
    notes: list[str] = []
    for other in others:
        if "error" in other:
            mark = f"({len(notes) + 1})"
            rows.append([other["partitioner"], _UNKNOWN, _UNKNOWN, _UNKNOWN, mark])
            notes.append(f"{mark} {other['error']}")
            continue
        times = [milliseconds(other["batch_s"]), percent(other["bubble_ratio"])]
        rows.append([
            other["partitioner"], *(times if case.has_times else [_UNKNOWN] * 2), mebibytes(other["peak_bytes"]),
            brackets(other["boundaries"]),
        ])  # fmt: skip
    return "\n".join([format_table(rows), *notes])
