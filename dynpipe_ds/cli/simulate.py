"""``dynpipe simulate``: one batch of a partition on paper, as text, picture and trace."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from dynpipe_ds.cli import reading, show
from dynpipe_ds.cli.command import OK, Result, UsageError, add_command, usage
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.planning import activation_caps, assume_halves, plan_order, worker_bytes_of_1f1b
from dynpipe_ds.reporting import save_chrome_trace, save_gantt
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import Interval, ScheduleName, Sends, Simulation, Workload, simulate

PLANNED = "planned"
WIDTH = 96
"""Columns of the text timeline."""

_SIGNS = {"forward": "F", "backward": "B", "weight": "W", "send": ">", "recv": ">", "step": "S", "wait": "."}
_COLUMNS = {
    "stage": "stage", "busy ms": "busy_s", "fill ms": "fill_s", "waiting ms": "waiting_s", "transfer ms": "transfer_s",
    "drain ms": "drain_s", "step ms": "step_s", "bubble": "bubble_ratio", "in flight": "peak_micro_batches",
    "activations MiB": "peak_activation_bytes",
}  # fmt: skip
_PICTURES = (".png", ".svg", ".pdf")

def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "simulate", run)
    partition = "boundaries such as 0,5,9,14, or what 'dynpipe plan --json' wrote (default: the profile's)"
    parser.option("--partition", "PARTITION", partition)
    parser.option("--against", "PARTITION", "a second partition to set beside the first")
    parser.add_argument(
        "--schedule", choices=(*get_args(ScheduleName), PLANNED), default="1f1b",
        help="planned: backwards in two parts, in an order planned from the times (default 1f1b)",
    )
    parser.add_argument(
        "--sends", choices=get_args(Sends), default="buffered",
        help="whether a send is over at once (buffered, as the engine sends; default) or with its receive",
    )
    reading.add_planned(parser)
    cap = "planned: most a stage may hold, as for 'dynpipe plan' (default: what the fullest one holds under 1f1b)"
    parser.option("--memory-cap-bytes", "SIZE", cap, reading.one_or_each(reading.num_bytes))
    parser.option("--step-s", "S", "seconds of the optimizer step", reading.one_or_each(reading.seconds), default=0.0)
    reading.add_simulated(parser)
    parser.option("--gantt", "FILE", f"draw the timeline ({', '.join(_PICTURES)})")
    parser.option("--trace", "FILE", "write a Chrome trace; open it at https://ui.perfetto.dev")


def run(arguments: argparse.Namespace) -> Result:
    """Show one batch of a partition in time.

    Prints when every stage computes (F forward, B backward, W gradients of weights apart), transfers (>), steps (S) and
    is idle (.), and where the time goes. docs/simulation.md says what the simulator models and what it leaves out.

    Examples:
      dynpipe simulate profile.json --partition 0,4,8 --gantt batch.png
      dynpipe simulate profile.json --partition 0,4,8 --against 0,5,8 --gantt both.png --trace batch.json
      dynpipe simulate profile.json --partition 0,2,4,8 --micro-batches 8 --gradient-link-s 0.01 --schedule gpipe --json
      dynpipe simulate profile.json --partition 0,4,8 --schedule planned --weight-share 0.4
    """
    if arguments.schedule == PLANNED and arguments.sends == "rendezvous":
        raise UsageError("--sends rendezvous: a planned order needs sends that are over at once; leave it out")
    if arguments.gantt and Path(arguments.gantt).suffix not in _PICTURES:
        raise UsageError(f"--gantt {arguments.gantt}: must end in one of {', '.join(_PICTURES)}")
    profile = reading.profile(arguments.profile, arguments.micro_batches)
    if not any(profile.costs("time")):
        raise UsageError(f"{arguments.profile} has no times to simulate; measure them with 'dynpipe profile'")
    if arguments.partition is None and not profile.boundaries:
        raise UsageError("the profile has no partition of its own; give one by --partition, such as 0,5,9,14")
    given = [text for text in (arguments.partition, arguments.against) if text is not None]
    partitions = [reading.partition(text, len(profile.layers)) for text in given]
    if arguments.partition is None:
        partitions.insert(0, profile.boundaries)
    with usage():
        worker_bytes = arguments.memory_cap_bytes or worker_bytes_of_1f1b(profile, partitions[0])
        planned = {cuts: _planned(profile, cuts, arguments, worker_bytes) for cuts in partitions}
        outcomes = {cuts: _simulate(profile, cuts, order, arguments) for cuts, order in planned.items()}
    named = {show.brackets(cuts): outcome for cuts, outcome in outcomes.items()}
    values = {
        "num_micro_batches": profile.num_micro_batches, "schedule": arguments.schedule, "sends": arguments.sends,
        "weight_share": arguments.weight_share if arguments.schedule == PLANNED else None,
        "partitions": [_values(cuts, planned[cuts], outcome) for cuts, outcome in outcomes.items()],
        "files": _write(arguments, named),
    }  # fmt: skip
    return OK, _text(named, profile.num_micro_batches, values), values


def _planned(
    profile: PipelineProfile, cuts: Sequence[int], arguments: argparse.Namespace, worker_bytes: int | Sequence[int]
) -> ScheduleName | Order:
    """The schedule by its name, or what is planned for the partition."""
    if arguments.schedule != PLANNED:
        name: ScheduleName = arguments.schedule
        return name
    return plan_order(_workload(profile, cuts, arguments), activation_caps(profile, cuts, worker_bytes)).order


def _simulate(
    profile: PipelineProfile, cuts: Sequence[int], schedule: ScheduleName | Order, arguments: argparse.Namespace
) -> Simulation:
    return simulate(_workload(profile, cuts, arguments), schedule, sends=arguments.sends, timeline=True)


def _workload(profile: PipelineProfile, cuts: Sequence[int], arguments: argparse.Namespace) -> Workload:
    return Workload.from_profile(
        assume_halves(profile, arguments.weight_share), cuts, activation_link_s=arguments.activation_link_s,
        gradient_link_s=arguments.gradient_link_s,
        step_s=arguments.step_s,
    )


def _write(arguments: argparse.Namespace, outcomes: Mapping[str, Simulation]) -> list[str]:
    """Write the picture (all partitions) and the trace (the first one)."""
    files, timelines = [], {name: outcome.timeline for name, outcome in outcomes.items()}
    if arguments.gantt:
        files.append(save_gantt(arguments.gantt, timelines, title="One simulated batch"))
    if arguments.trace:
        name = next(iter(timelines))
        files.append(save_chrome_trace(arguments.trace, timelines[name], name=name))
    return [str(file) for file in files]


def _values(cuts: Sequence[int], schedule: ScheduleName | Order, outcome: Simulation) -> dict[str, Any]:
    stages = [asdict(stage) | {"bubble_ratio": stage.bubble_ratio} for stage in outcome.stages]
    return {
        "boundaries": list(cuts), "makespan_s": outcome.makespan_s, "batch_s": outcome.batch_s,
        "bubble_ratio": outcome.bubble_ratio, "stages": stages,
        "order": str(schedule) if isinstance(schedule, Order) else None,
    }  # fmt: skip


def _text(outcomes: Mapping[str, Simulation], num_micro_batches: int, values: Mapping[str, Any]) -> str:
    longest_s = max(outcome.batch_s for outcome in outcomes.values())
    parts = []
    for (name, outcome), found in zip(outcomes.items(), values["partitions"], strict=True):
        parts += [
            f"partition {name}: {show.milliseconds(outcome.batch_s)} ms a batch of {num_micro_batches} micro-batches, "
            f"bubble {outcome.bubble_ratio:.1%}",
            "", text_timeline(outcome.timeline, longest_s), "",
            show.table(_COLUMNS, ({"stage": i, **stage} for i, stage in enumerate(found["stages"]))), "",
        ]  # fmt: skip
    if len(outcomes) == 2:
        first, second = outcomes.values()
        parts += [f"the second takes {second.batch_s / first.batch_s:.3f} times as long as the first", ""]
    if (weight_share := values["weight_share"]) is not None:
        parts += [*show.planned(weight_share), ""]
    parts += [f"written: {file}" for file in values["files"]]
    return "\n".join(parts).rstrip()


def text_timeline(timeline: Sequence[Interval], until_s: float, width: int = WIDTH) -> str:
    """Draw intervals with characters, a row a stage: what it does most in each stretch of ``until_s`` seconds."""
    num_stages = 1 + max(interval.stage for interval in timeline)
    column_s = until_s / width
    untouched = {".": column_s, **dict.fromkeys("FBW>S", 0.0)}  # of equal shares the first one is shown
    share_s = [[dict(untouched) for _ in range(width)] for _ in range(num_stages)]
    for interval in timeline:
        first, last = int(interval.start_s / column_s), int(interval.end_s / column_s)
        for column in range(first, min(last, width - 1) + 1):
            low, high = max(interval.start_s, column * column_s), min(interval.end_s, (column + 1) * column_s)
            share_s[interval.stage][column][_SIGNS[interval.kind]] += max(0.0, high - low)
            share_s[interval.stage][column]["."] -= max(0.0, high - low)
    label = len(str(num_stages - 1))
    return "\n".join(
        f"stage {stage:{label}} |{''.join(max(shares, key=shares.__getitem__) for shares in row)}|"
        for stage, row in enumerate(share_s)
    )

