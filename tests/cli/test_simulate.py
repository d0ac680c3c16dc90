"""``dynpipe simulate``: the simulator's figures, drawn with characters, as a picture and as a trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dynpipe_ds.cli.simulate import text_timeline
from dynpipe_ds.planning import activation_caps, assume_halves, plan_order, worker_bytes_of_1f1b
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import Interval, Workload, simulate
from tests.cli.conftest import Command, example_profile

pytestmark = pytest.mark.usefixtures("workplace")


def test_figures_are_the_simulators(dynpipe: Command) -> None:
    """With links, another schedule and a step."""
    options = "--schedule gpipe --step-s 0.003 --activation-link-s 0.001 --gradient-link-s 0.002"
    values = dynpipe("simulate", "profile.json", "--partition", "0,3,8", *options.split(), "--json").json
    workload = Workload.from_profile(
        example_profile(), (0, 3, 8), activation_link_s=0.001, gradient_link_s=0.002, step_s=0.003
    )
    outcome = simulate(workload, "gpipe")
    (found,) = values["batches"]
    assert (found["makespan_s"], found["batch_s"]) == (outcome.makespan_s, outcome.batch_s)
    assert [stage["waiting_s"] for stage in found["stages"]] == [stage.waiting_s for stage in outcome.stages]
    assert found["boundaries"] == [0, 3, 8] and values["num_micro_batches"] == 4


def test_partition_of_a_plan_and_a_second_one(dynpipe: Command) -> None:
    """What `plan --json` wrote is a partition; both pictures have one axis."""
    Path("plan.json").write_text(dynpipe("plan", "profile.json", "--stages", 2, "--json").out, encoding="utf-8")
    done = dynpipe("simulate", "profile.json", "--partition", "plan.json", "--against", "0,1,8")
    first, second = (line for line in done.out.splitlines() if line.startswith("partition"))
    assert "[0 4 8]" in first and "[0 1 8]" in second
    ratio = simulate(Workload.from_profile(example_profile(), (0, 1, 8))).makespan_s / (
        simulate(Workload.from_profile(example_profile(), (0, 4, 8))).makespan_s
    )
    assert second.endswith(f", {ratio:.3f} times the first")
    rows = [line for line in done.out.splitlines() if line.startswith("stage ") and "|" in line]
    assert len(rows) == 4 and len({len(row) for row in rows}) == 1
    assert rows[0].endswith(".|"), "the shorter one ends before the axis does"


def test_picture_and_trace(dynpipe: Command) -> None:
    """Written where asked, folders made; the trace has the partition's name."""
    done = dynpipe("simulate", "profile.json", "--partition", "0,4,8", "--gantt", "new/a.png", "--trace", "new/b.json")
    assert Path("new/a.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads(Path("new/b.json").read_text(encoding="utf-8"))["traceEvents"]
    assert events[0]["args"]["name"] == "[0 4 8], 1F1B"
    assert "written: new/a.png" in done.out and "written: new/b.json" in done.out


def test_characters_of_a_timeline() -> None:
    """Each shows what fills most of its stretch; idle time needs no interval."""
    timeline = [
        Interval(0, "forward", 0, 0.0, 2.0), Interval(0, "send", 0, 2.0, 3.0, "activation"),
        Interval(0, "backward", 0, 6.0, 7.4), Interval(1, "recv", 0, 2.0, 3.0, "activation"),
        Interval(1, "step", -1, 7.6, 8.0), Interval(0, "message", 0, 2.0, 6.0, "activation"),
    ]  # fmt: skip
    assert text_timeline(timeline, 8.0, width=8) == "stage 0 |FF>...B.|\nstage 1 |..>.....|"
    assert text_timeline(timeline, 8.0, width=16) == "stage 0 |FFFF>>......BBB.|\nstage 1 |....>>.........S|"


@pytest.mark.parametrize("printed", ["[0 4 8]", "(0, 4, 8)", "0|4|8", "0,4,8"])
def test_a_partition_as_it_is_printed(dynpipe: Command, printed: str) -> None:
    """By the commands, by Python, as a plan's short form; so that it can be copied."""
    values = dynpipe("simulate", "profile.json", "--partition", printed, "--json").json
    assert values["batches"][0]["boundaries"] == [0, 4, 8]


def test_a_planned_order(dynpipe: Command) -> None:
    """As the planner has it, in the memory of 1F1B; the text shows the gradients of weights and what is assumed."""
    profile = assume_halves(example_profile(), 0.4)
    options = "--weight-share 0.4 --activation-link-s 0.001 --partition 0,3,6,8".split()
    (found,) = dynpipe("simulate", "profile.json", *options, "--json").json["batches"]
    workload = Workload.from_profile(profile, (0, 3, 6, 8), activation_link_s=0.001)
    caps = activation_caps(profile, (0, 3, 6, 8), worker_bytes_of_1f1b(profile, (0, 3, 6, 8)))
    planned = plan_order(workload, caps)
    assert not planned.is_1f1b
    assert (found["schedule"], found["order"], found["makespan_s"]) == ("planned", str(planned.order), planned.seconds)
    assert simulate(workload, Order.parse(found["order"])).makespan_s == found["makespan_s"]
    text = dynpipe("simulate", "profile.json", *options).out
    assert {*"FBW>."} <= set(text.split("stage 1 |")[1].splitlines()[0])
    assert "of a backward 40% are gradients of weights, which may be done later (--weight-share)" in text


def test_the_order_that_is_shown(dynpipe: Command) -> None:
    """Planned where the profile has measured halves, which nobody may assume then; else 1F1B; several side by side."""
    command = ("simulate", "--partition", "0,3,6,8", "--json")
    assume_halves(example_profile(), 0.4).save("halves.json")
    measured, unknown = (dynpipe(*command, path).json for path in ("halves.json", "profile.json"))
    (found,), (usual,) = measured["batches"], unknown["batches"]
    assumed = dynpipe(*command, "profile.json", "--weight-share", 0.4).json
    assert found["schedule"] == "planned" and assumed["batches"] == [found]
    assert (measured["weight_share"], assumed["weight_share"]) == (None, 0.4)
    assert usual["schedule"] == "1f1b" and usual["makespan_s"] > found["makespan_s"]
    refused = dynpipe(*command, "halves.json", "--weight-share", 0.4)
    assert refused.code == 2 and "halves.json has what was measured; leave it out" in refused.err
    options = ("--schedule", "1f1b,planned", "--trace", "a.json")
    both = dynpipe("simulate", "halves.json", "--partition", "0,3,6,8", *options)
    lines = [line for line in both.out.splitlines() if line.startswith("partition")]
    assert "[0 3 6 8], 1F1B: " in lines[0] and "[0 3 6 8], planned order: " in lines[1] and "assumed" not in both.out
    assert lines[1].endswith(f", {found['makespan_s'] / usual['makespan_s']:.3f} times the first")
    trace = json.loads(Path("a.json").read_text(encoding="utf-8"))["traceEvents"]
    assert {event["pid"] for event in trace if event.get("cat") == "weight"} == {1}
    wrong = dynpipe(*command, "profile.json", "--schedule", "1f1b,none")
    assert wrong.code == 2 and "'1f1b,none' must be one of 1f1b, gpipe, planned, or several" in wrong.err


def test_memory_of_a_planned_order(dynpipe: Command) -> None:
    """A cap on state and activations; less memory takes longer, too little is refused."""
    command = ("simulate", "profile.json", "--partition", "0,3,6,8", "--weight-share", "0.5", "--json")
    wide, tight = (dynpipe(*command, "--memory-cap-bytes", cap) for cap in ("1MiB", "28KiB"))
    assert wide.json["batches"][0]["makespan_s"] < tight.json["batches"][0]["makespan_s"]
    refused = dynpipe(*command, "--memory-cap-bytes", "9KiB")
    assert refused.code == 2 and "stage 0 may hold 9,216 bytes: must be at least the " in refused.err
    assert "one micro-batch (3,000) take; raise the cap" in refused.err
