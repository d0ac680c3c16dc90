"""``dynpipe plan``: the planner's own answer, with the simulator's figures and hand-made memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dynpipe_ds.cli.finer import halved
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.partition import optimal, registry, simulated
from dynpipe_ds.planning import activation_caps, assume_halves, plan_order, worker_bytes_of_1f1b
from dynpipe_ds.simulation import Workload, simulate
from tests.cli.conftest import Command, example_profile

pytestmark = pytest.mark.usefixtures("workplace")


def test_partition_time_bubble_and_memory(dynpipe: Command) -> None:
    """As `optimal` and `simulate` have them; memory by hand: state, and activations of min(M, S - s) micro-batches."""
    profile = example_profile()
    values = dynpipe("plan", "profile.json", "--stages", 3, "--json").json
    plan = optimal(profile.costs("time"), 3)
    outcome = simulate(Workload.from_profile(profile, plan.boundaries))
    assert tuple(values["boundaries"]) == plan.boundaries
    assert (values["batch_s"], values["bubble_ratio"]) == (outcome.makespan_s, outcome.bubble_ratio)
    assert values["bottleneck"] == pytest.approx(plan.bottleneck) and values["current"] is None
    assert values["imbalance"] == pytest.approx(plan.bottleneck * 3 / sum(profile.costs("time")) - 1)
    for s, stage in enumerate(values["stages"]):
        low, high = plan.boundaries[s : s + 2]
        state = sum(1600 * (i + 1) for i in range(low, high))
        assert stage["peak_bytes"] == state + (3 - s) * 1000 * (high - low)
        assert stage["forward_s"] == pytest.approx(sum(layer.forward_s for layer in profile.layers[low:high]))
        assert stage["cap_bytes"] is None


def test_the_table_says_the_same(dynpipe: Command) -> None:
    """Partition, time and one row a stage; a cap has a column."""
    values = dynpipe("plan", "profile.json", "--stages", 3, "--json").json
    text = dynpipe("plan", "profile.json", "--stages", 3, "--memory-cap-bytes", "1MiB").out
    assert f"[{' '.join(map(str, values['boundaries']))}]" in text
    assert f"{values['batch_s'] * 1e3:.2f} ms, bubble {values['bubble_ratio']:.1%}" in text
    assert "cap MiB" in text and text.splitlines()[1].split() == ["order", "1F1B"]
    assert len(text.split("\n\n")[1].splitlines()) == 2 + 3


def test_what_finer_layers_would_bring(dynpipe: Command) -> None:
    """Five equal blocks on two stages: a stage has three of them, or two and a half. Four divide evenly."""
    for count, ratio in ((5, 2.5 / 3), (4, None)):
        layers = [LayerProfile(f"Block {i}", 1.0, 2.0, 10, 41, 41, 82, 1001) for i in range(count)]
        PipelineProfile(0, (0, 2, count), 64, tuple(layers), ()).save("blocks.json")
        done = dynpipe("plan", "blocks.json"), dynpipe("plan", "blocks.json", "--json").json
        finer_s, batch_s = done[1]["finer_batch_s"], done[1]["batch_s"]
        if ratio is None:
            assert finer_s == pytest.approx(batch_s) and "finer" not in done[0].out
        else:
            assert finer_s == pytest.approx(ratio * batch_s, rel=0.02)
            line = "finer       with every Block in two equal halves a batch would take "
            assert line in done[0].out
    assert dynpipe("plan", "blocks.json", "--pinned-cuts", 1, "--json").json["finer_batch_s"] is None
    layers = halved(PipelineProfile(0, (0, 2, count), 64, tuple(layers), ())).layers
    sums = [sum(getattr(layer, name) for layer in layers) for name in ("state_bytes", "activation_bytes")]
    assert sums == [4 * 164, 4 * 1001], "no byte is lost"


def test_a_cap_moves_the_cut(dynpipe: Command) -> None:
    """Balance by time puts 4 layers on the last stage; a cap on it allows fewer."""
    free = dynpipe("plan", "profile.json", "--stages", 2, "--json").json
    last = free["stages"][1]["peak_bytes"]
    capped = dynpipe("plan", "profile.json", "--stages", 2, "--memory-cap-bytes", f"1MiB,{last - 1}", "--json").json
    assert capped["boundaries"][1] > free["boundaries"][1]
    assert capped["stages"][1]["peak_bytes"] < last == capped["stages"][1]["cap_bytes"] + 1


def test_links_and_micro_batches_count(dynpipe: Command) -> None:
    """In the prediction, and for the partitioner that knows them."""
    profile = example_profile()
    options = ["--micro-batches", 2, "--activation-link-s", "0,0.05", "--gradient-link-s", "0,0.05"]
    values = dynpipe("plan", "profile.json", "--stages", 3, "--partitioner", "simulated", *options, "--json").json
    links = {"activation_link_s": [0, 0.05], "gradient_link_s": [0, 0.05]}
    two = type(profile)(0, (), 2, profile.layers, ())
    plan = simulated(profile.costs("time"), 3, profile=two, layer_bytes=profile.moved_bytes(), **links)
    assert tuple(values["boundaries"]) == plan.boundaries and values["num_micro_batches"] == 2
    assert values["batch_s"] == simulate(Workload.from_profile(two, plan.boundaries, **links)).makespan_s


def test_settings_of_the_deepspeed_json(dynpipe: Command) -> None:
    """Keys of the section count; an option wins; its contradictions are refused as there."""
    section = {"enabled": False, "partitioner": "diffusion", "cost": "parameters", "pinned_cuts": [4]}
    Path("other.json").write_text(json.dumps({"dynamic_pipeline": section}), encoding="utf-8")
    values = dynpipe("plan", "profile.json", "--stages", 2, "--config", "other.json", "--json").json
    assert (values["partitioner"], values["cost"]) == ("diffusion", "parameters")
    assert values["boundaries"][1] not in (0, 4, 8)
    command = ("plan", "profile.json", "--stages", 2, "--config", "other.json", "--cost", "time", "--json")
    assert dynpipe(*command).json["cost"] == "time"
    Path("other.json").write_text('{"dynamic_pipeline": {"min_gain": 5, "oops": 1}}', encoding="utf-8")
    refused = dynpipe(*command)
    assert refused.code == 2 and "min_gain = 5" in refused.err and "oops = 1" in refused.err


def test_against_the_present_partition(dynpipe: Command) -> None:
    """The profile's own, or a given one: its time, and what moving promises."""
    example_profile(boundaries=(0, 1, 8)).save("trained.json")
    values = dynpipe("plan", "trained.json", "--json").json
    assert values["current"]["boundaries"] == [0, 1, 8]
    assert values["current"]["batch_s"] > values["batch_s"]
    gain = 1 - values["batch_s"] / values["current"]["batch_s"]
    assert values["current"]["predicted_gain"] == pytest.approx(gain) and gain > 0.1
    moved = sum(example_profile().moved_bytes()[1 : values["boundaries"][1]])
    assert values["current"]["bytes_to_move"] == moved
    assert f"this shortens a batch by {gain:.1%} and moves" in dynpipe("plan", "trained.json").out
    given = ("plan", "profile.json", "--stages", 2, "--current", "0,4,8")
    assert "the same partition" in dynpipe(*given).out
    assert "without moving a layer" in dynpipe(*given, "--weight-share", 0.5).out


def test_every_partitioner_is_compared(dynpipe: Command) -> None:
    """The asked one first; one that can't satisfy the constraints says why; orders are compared where W is known."""
    options = ("--memory-cap-bytes", "39000", "--current", "0,7,8")
    done = dynpipe("plan", "profile.json", "--stages", 2, *options, "--json")
    rows = {row["partitioner"]: row for row in done.json["compared"]}
    assert len(rows) == len(done.json["compared"]) and {row["order"] for row in rows.values()} == {"1F1B"}
    assert next(iter(rows)) == "optimal"
    assert {*rows} == {"optimal", "uniform", "balanced", "diffusion", "simulated", "now"}
    assert "its cap is 39,000" in rows["uniform"]["error"] and rows["optimal"]["peak_bytes"] <= 39000
    assert rows["now"]["boundaries"] == [0, 7, 8]
    text = dynpipe("plan", "profile.json", "--stages", 2, *options).out
    assert "(1)" in text and "planned orders are left out: no backward was split" in text
    assert "planned" not in dynpipe("plan", "profile.json", "--stages", 2, *options, "--schedule", "1f1b").out


def test_partitions_and_orders_are_compared(dynpipe: Command) -> None:
    """Each partition under 1F1B and under its own planned order, within one cap; the best of both together is taken."""
    eight = assume_halves(replace(example_profile(), num_micro_batches=8), 0.4)
    options = ("--stages", 3, "--micro-batches", 8, "--weight-share", 0.4)
    values = dynpipe("plan", "profile.json", *options, "--json").json
    most = worker_bytes_of_1f1b(eight, optimal(eight.costs("time"), 3).boundaries)
    *rows, together = values["compared"]
    assert together["partitioner"] == "together" == values["partitioner"]
    for usual, planned in zip(rows[::2], rows[1::2], strict=True):
        assert usual["partitioner"] == planned["partitioner"] and usual["boundaries"] == planned["boundaries"]
        assert (usual["order"], planned["order"]) == ("1F1B", "planned")
        workload = Workload.from_profile(eight, usual["boundaries"])
        assert usual["batch_s"] == simulate(workload).makespan_s
        found = plan_order(workload, activation_caps(eight, usual["boundaries"], most))
        assert (planned["batch_s"], planned["bubble_ratio"]) == (found.seconds, found.simulation.bubble_ratio)
        assert planned["batch_s"] < usual["batch_s"] and planned["peak_bytes"] <= most
        assert together["batch_s"] <= planned["batch_s"] * (1 + 1e-9)
    for key in ("boundaries", "order", "batch_s", "bubble_ratio"):
        assert values[key] == together[key]
    assert max(stage["peak_bytes"] for stage in values["stages"]) == together["peak_bytes"] <= most
    text = dynpipe("plan", "profile.json", *options).out
    assert text.splitlines()[1] == "order       planned, chosen with the partition"
    found = [line.split()[:2] for line in text.splitlines() if line.split()[1:2] in (["1F1B"], ["planned"])]
    assert found[:2] == [["optimal", "1F1B"], ["optimal", "planned"]] and found[-1] == ["together", "planned"]
    assert "of a backward 40% are gradients of weights, which may be done later (--weight-share)" in text
    eight.save("halves.json")
    measured = dynpipe("plan", "halves.json", "--stages", 3)
    assert measured.out.rstrip() == text[: text.index("assumed")].rstrip() and "assumed" not in measured.out
    usual = dynpipe("plan", "halves.json", "--stages", 3, "--schedule", "1f1b", "--json").json
    assert [row["order"] for row in usual["compared"]] == ["1F1B"] * (len(rows) // 2) and usual["order"] == "1F1B"


@pytest.mark.parametrize(
    ("stages", "more", "same"),
    [
        (1, (), ["optimal", "balanced", "diffusion", "simulated", "uniform"]),
        (2, ("--current", "0,8,8", "--allow-empty-stages"), ["now"]),
        (2, (), []),
    ],
)
def test_a_planned_order_that_is_1f1b_has_no_row(
    dynpipe: Command, stages: int, more: tuple[str, ...], same: list[str]
) -> None:
    """Where one stage has all layers there is no other order: a line says so, and no row of the table."""
    command = ("plan", "profile.json", "--stages", stages, "--micro-batches", 8, "--weight-share", 0.4, *more)
    rows = dynpipe(*command, "--json").json["compared"]
    assert [row["partitioner"] for row in rows if row["order"] == "planned" and row["is_1f1b"]] == same
    usual = {row["partitioner"]: row["batch_s"] for row in rows if row["order"] == "1F1B"}
    assert all(row["batch_s"] == usual[row["partitioner"]] for row in rows if row["partitioner"] in same)
    lines = dynpipe(*command).out.splitlines()
    said = [line for line in lines if line.startswith("the planned order")]
    found = [line.split()[:2] for line in lines if line not in said]
    table = [start for start in found if start[1:] in (["1F1B"], ["planned"])]
    shown = [row for row in rows if row["order"] == "1F1B" or row["partitioner"] not in same]
    assert table == [[row["partitioner"], row["order"]] for row in shown]
    assert said == ([f"the planned order is 1F1B: {', '.join(same)}"] if same else [])


def test_memory_of_planned_orders(dynpipe: Command) -> None:
    """All keep the cap; a partition that has no room for an order says so."""
    options = ("--stages", 3, "--micro-batches", 8, "--weight-share", 0.4, "--memory-cap-bytes", 30000)
    rows = dynpipe("plan", "profile.json", *options, "--current", "0,1,2,8", "--json").json["compared"]
    kept = [row for row in rows if "error" not in row and row["partitioner"] != "now"]
    assert len(kept) >= 3 and all(row["peak_bytes"] <= 30000 for row in kept)
    (wrong,) = [row for row in rows if row["partitioner"] == "now" and row["order"] == "planned"]
    assert "stage 2 may hold 30,000 bytes" in wrong["error"]


def test_the_budget_of_the_section(dynpipe: Command) -> None:
    """Keys of the JSON file count, by its rules; more memory is faster; an option wins."""
    options = ("--stages", 3, "--micro-batches", 8, "--weight-share", 0.5, "--json")
    sections = {"wide.json": ("activation_budget", 2.0), "usual.json": ("schedule", "1f1b")}
    for name, section in {**sections, "low.json": ("activation_budget", 0.1)}.items():
        Path(name).write_text(json.dumps({"dynamic_pipeline": dict([section])}), encoding="utf-8")
    plain, wide = (dynpipe("plan", "profile.json", *options, *more).json for more in ((), ("--config", "wide.json")))
    assert wide["batch_s"] < plain["batch_s"]
    assert max(s["peak_bytes"] for s in wide["stages"]) > max(s["peak_bytes"] for s in plain["stages"])
    assert dynpipe("plan", "profile.json", *options, "--config", "wide.json", "--activation-budget", 1).json == plain
    assert dynpipe("plan", "profile.json", *options, "--config", "usual.json").json["order"] == "1F1B"
    refused = dynpipe("plan", "profile.json", *options, "--config", "low.json")
    assert refused.code == 2 and "activation_budget = 0.1: under 1F1B a worker holds at most 3" in refused.err


def test_an_own_partitioner(dynpipe: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Registered by a module that is imported first."""
    monkeypatch.setattr(registry, "_partitioners", dict(registry._partitioners))
    Path("mine.py").write_text(
        "from dynpipe_ds import register_partitioner\n"
        "@register_partitioner('all_but_one')\n"
        "def f(costs, num_stages, **_): return [0, len(costs) - num_stages + 1, *range(2 + len(costs) - num_stages, "
        "len(costs) + 1)]\n", encoding="utf-8",
    )  # fmt: skip
    done = dynpipe("plan", "profile.json", "--stages", 3, "--import", "mine", "--partitioner", "all_but_one", "--json")
    assert done.json["boundaries"] == [0, 6, 7, 8]


def test_a_profile_without_times(dynpipe: Command) -> None:
    """Balances parameters, and says that it knows no times."""
    example_profile((0.0,) * 8).save("counts.json")
    refused = dynpipe("plan", "counts.json", "--stages", 2)
    assert refused.code == 2 and "has no time at all" in refused.err and "--cost parameters" in refused.err
    done = dynpipe("plan", "counts.json", "--stages", 2, "--cost", "parameters")
    assert done.code == 0 and "n/a: the profile has no times" in done.out
    options = ("--cost", "parameters", "--weight-share", 0.5, "--json")
    compared = dynpipe("plan", "counts.json", "--stages", 2, *options).json["compared"]
    assert {row["order"] for row in compared} == {"1F1B"} and compared[0]["batch_s"] is None
