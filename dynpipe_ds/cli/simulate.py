"""``dynpipe simulate``: one batch of a partition in an order, on paper, as text, picture and trace."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_args

from dynpipe_ds.cli import reading, show
from dynpipe_ds.cli.command import OK, Result, UsageError, add_command, usage
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.planning import plan_on_partition, worker_bytes_of_1f1b
from dynpipe_ds.reporting import save_chrome_trace, save_gantt
from dynpipe_ds.schedule import Order, order_of
from dynpipe_ds.simulation import Interval, ScheduleName, Simulation, Workload, simulate

PLANNED = "planned"
SCHEDULES = (*get_args(ScheduleName), PLANNED)
WIDTH = 96
"""Columns of the text timeline."""

_SIGNS = {"forward": "F", "backward": "B", "weight": "W", "send": ">", "recv": ">", "step": "S", "wait": "."}
_NAMES = {"1f1b": "1F1B", "gpipe": "GPipe", PLANNED: "planned order"}
_COLUMNS = {
    "stage": "stage", "busy ms": "busy_s", "fill ms": "fill_s", "waiting ms": "waiting_s", "transfer ms": "transfer_s",
    "drain ms": "drain_s", "step ms": "step_s", "bubble": "bubble_ratio", "in flight": "peak_micro_batches",
    "activations MiB": "peak_activation_bytes",
}  # fmt: skip
_PICTURES = (".png", ".svg", ".pdf")
_schedules = reading.value_of(
    lambda text: text.split(","), lambda names: set(names) <= set(SCHEDULES),
    f"one of {', '.join(SCHEDULES)}, or several with commas between them",
)  # fmt: skip



def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "simulate", run)
    partition = "boundaries such as 0,5,9,14, or what 'dynpipe plan --json' wrote (default: the profile's)"
    parser.option("--partition", "PARTITION", partition)
    parser.option("--against", "PARTITION", "a second partition to set beside the first")
    parser.option(
        "--schedule", "NAME,...",
        f"one or more of {', '.join(SCHEDULES)}; planned: an order planned from the times (default: planned where it "
        "is known which part of a backward can run later, else 1f1b)", _schedules,
    )  # fmt: skip
    cap = "planned: most a stage may hold, as for 'dynpipe plan' (default: what the fullest one holds under 1f1b)"
    parser.option("--memory-cap-bytes", "SIZE", cap, reading.one_or_each(reading.num_bytes))
    parser.option("--step-s", "S", "seconds of the optimizer step", reading.one_or_each(reading.seconds), default=0.0)
    reading.add_simulated(parser)
    parser.option("--gantt", "FILE", f"draw the timeline ({', '.join(_PICTURES)})")
    parser.option("--trace", "FILE", "write a Chrome trace; open it at https://ui.perfetto.dev")


@dataclass(frozen=True)
class _Batch:
    """A partition that is run by a schedule."""

    boundaries: tuple[int, ...]
    schedule: str
    order: Order
    outcome: Simulation

    @property
    def name(self) -> str:
        return f"{show.brackets(self.boundaries)}, {_NAMES[self.schedule]}"


def run(arguments: argparse.Namespace) -> Result:
    """Show one batch of a partition in time.

    Prints when every stage computes (F forward, B backward, W weight gradients that were left for later), waits for a
    message on its way (>), runs the optimizer (S) and is idle (.), and where the time goes. Pictures and traces show
    every message. docs/schedules.md explains the orders, docs/simulation.md what the simulator leaves out.

    Examples:
      dynpipe simulate profile.json --partition 0,4,8 --gantt batch.png
      dynpipe simulate profile.json --partition 0,4,8 --against 0,5,8 --gantt both.png --trace batch.json
      dynpipe simulate profile.json --partition 0,2,4,8 --micro-batches 8 --gradient-link-s 0.01 --schedule gpipe --json
      dynpipe simulate profile.json --partition 0,4,8 --schedule 1f1b,planned --weight-share 0.4
    """
    if arguments.gantt and Path(arguments.gantt).suffix not in _PICTURES:
        raise UsageError(f"--gantt {arguments.gantt}: must end in one of {', '.join(_PICTURES)}")
    profile = reading.profile(arguments)
    schedules = arguments.schedule or [PLANNED if reading.has_halves(profile) else "1f1b"]
    if not any(profile.costs("time")):
        raise UsageError(f"{arguments.profile} has no times to simulate; measure them with 'dynpipe profile'")
    if arguments.partition is None and not profile.boundaries:
        raise UsageError("the profile has no partition of its own; give one by --partition, such as 0,5,9,14")
    given = [text for text in (arguments.partition, arguments.against) if text is not None]
    partitions = [reading.partition(text, len(profile.layers)) for text in given]
    if arguments.partition is None:
        partitions.insert(0, profile.boundaries)
    with usage():
        # As in training: what 1F1B needs on the first partition, or on the one that is run.
        needed = {cuts: max(worker_bytes_of_1f1b(profile, one) for one in (partitions[0], cuts)) for cuts in partitions}
        batches = [
            _simulate(profile, cuts, schedule, arguments, arguments.memory_cap_bytes or needed[cuts])
            for cuts in dict.fromkeys(partitions) for schedule in dict.fromkeys(schedules)
        ]  # fmt: skip
    values = {
        "num_micro_batches": profile.num_micro_batches, "weight_share": arguments.weight_share,
        "batches": list(map(_values, batches)), "files": _write(arguments, batches),
    }  # fmt: skip
    return OK, _text(batches, values), values


def _simulate(
    profile: PipelineProfile, cuts: tuple[int, ...], schedule: str, arguments: argparse.Namespace,
    worker_bytes: int | Sequence[int],
) -> _Batch:
    links = {"activation_link_s": arguments.activation_link_s, "gradient_link_s": arguments.gradient_link_s}
    if schedule == PLANNED:
        order = plan_on_partition(profile, cuts, worker_bytes, **links).order
    else:
        order = order_of(cast(ScheduleName, schedule), profile.num_micro_batches, len(cuts) - 1)
    workload = Workload.running(order, profile, cuts, step_s=arguments.step_s, **links)
    return _Batch(cuts, schedule, order, simulate(workload, order, timeline=True))


def _write(arguments: argparse.Namespace, batches: Sequence[_Batch]) -> list[str]:
    """Write the picture and the trace."""
    files, timelines = [], {batch.name: batch.outcome.timeline for batch in batches}
    if arguments.gantt:
        files.append(save_gantt(arguments.gantt, timelines, title="Simulated"))
    if arguments.trace:
        files.append(save_chrome_trace(arguments.trace, timelines))
    return [str(file) for file in files]


def _values(batch: _Batch) -> dict[str, Any]:
    outcome = batch.outcome
    stages = [asdict(stage) | {"bubble_ratio": stage.bubble_ratio} for stage in outcome.stages]
    return {
        "boundaries": list(batch.boundaries), "schedule": batch.schedule, "makespan_s": outcome.makespan_s,
        "batch_s": outcome.batch_s, "bubble_ratio": outcome.bubble_ratio, "stages": stages, "order": str(batch.order),
    }  # fmt: skip


def _text(batches: Sequence[_Batch], values: Mapping[str, Any]) -> str:
    longest_s = max(batch.outcome.batch_s for batch in batches)
    parts = []
    for batch, found in zip(batches, values["batches"], strict=True):
        outcome = batch.outcome
        ratio = outcome.batch_s / batches[0].outcome.batch_s
        times = f", {ratio:.3f} times the first" if batch is not batches[0] else ""
        parts += [
            f"partition {batch.name}: {show.milliseconds(outcome.batch_s)} ms a batch of {values['num_micro_batches']} "
            f"micro-batches, bubble {outcome.bubble_ratio:.1%}{times}",
            "", text_timeline(outcome.timeline, longest_s), "",
            show.table(_COLUMNS, ({"stage": i, **stage} for i, stage in enumerate(found["stages"]))), "",
        ]  # fmt: skip
    if values["weight_share"] is not None and any(batch.schedule == PLANNED for batch in batches):
        parts += [show.assumed(values["weight_share"]), ""]
    parts += [f"written: {file}" for file in values["files"]]
    return "\n".join(parts).rstrip()


def text_timeline(timeline: Sequence[Interval], until_s: float, width: int = WIDTH) -> str:
    """Draw intervals with characters, a row a stage: what it does most in each stretch of ``until_s`` seconds."""
    num_stages = 1 + max(interval.stage for interval in timeline)
    column_s = until_s / width
    untouched = {".": column_s, **dict.fromkeys("FBW>S", 0.0)}  # of equal shares the first one is shown
    share_s = [[dict(untouched) for _ in range(width)] for _ in range(num_stages)]
    for interval in timeline:
        if interval.kind == "message":  # what a stage waits for is an interval of its own
            continue
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
