"""The measured benchmarks of experts that move: what ranks are told, what they count, and what tables say of it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.expert_parallel import lanes as products
from benchmarks.expert_parallel import main as two_ranks
from benchmarks.experts import memory, predicted, replayed
from benchmarks.experts.drawn import calibrated, routed, sample_of
from benchmarks.experts.settings import Setting
from benchmarks.experts.waiting import BACKWARD, Sizes, Waiting, check_gradients
from scenarios.moe.placing import Constants, Lanes, plan
from scenarios.report.interval import Estimate
from tests.distributed.ranks import run_ranks

SIZES = Sizes(num_experts=8, hidden=4, width=8, blocks=2, micro_batches=2, rows=64, row_s=1e-6, rest_s=1e-4)
SETTING = Setting("S", "HPWNV", 2, 8, 1, 128)


def test_all_rows_are_drawn_and_cut_into_equal_micro_batches() -> None:
    batches = routed(SETTING, SIZES, 3)
    assert [len(batch) for batch in batches] == [2] * 3
    for block in range(SIZES.blocks):
        for batch, loads in zip(batches, SETTING.loads(block, 3), strict=True):
            parts = batch[block]
            assert torch.equal(torch.stack(parts).sum(0), torch.from_numpy(loads))
            assert all(part.sum(1).tolist() == [64, 64] for part in parts)
    assert not torch.equal(batches[0][0][0], batches[0][1][0])
    again = routed(SETTING, SIZES, 3)
    assert torch.equal(batches[2][1][1], again[2][1][1])


def test_waits_are_those_of_the_busiest_rank() -> None:
    table = torch.tensor([[3, 1], [5, 1]])
    static, local = Lanes.static(2, 2), Lanes.local(2, 2)
    sizes = replace(SIZES, row_s=1.0, rest_s=10.0)
    assert sizes.busy_s([[static]], [[table]]) == (1 + BACKWARD) * (8 + 10)
    assert sizes.busy_s([[local, static]], [[table, table]]) == (1 + BACKWARD) * (6 + 10 + 8 + 10)


def _waits(_rank: int) -> dict[str, Any]:
    stage, tables = Waiting(SIZES), routed(SETTING, SIZES, 1)[0]
    placed = Lanes.parse("2x8 0@1:1 6@0:0-1")
    lanes = {0: placed, 1: Lanes.local(2, 8)}
    first = stage.batch(tables, lanes, lambda layer, rows: Lanes.local(2, 8))
    second = stage.batch(tables, first.shared.plans, None, lambda lanes, rows: Lanes.static(2, 8))
    found = {
        "first": first, "second": second,
        "constants": calibrated(SIZES, SETTING, 1), "sample": sample_of(first, 0),
    }  # fmt: skip
    stage.close()
    return found


def test_what_waits_travels_as_in_a_training_and_comes_home_once() -> None:
    one, other = run_ranks(_waits, 2)
    first, sizes = one["first"], SIZES
    assert {layer: str(lanes) for layer, lanes in first.shared.lanes.items()} == {
        0: "2x8 0@1:1 6@0:0-1", 1: "2x8 local"
    }  # fmt: skip
    expert_bytes = sum(4 * out * ins for out, ins in sizes.shapes)
    assert first.shared.sums.trans_bytes == (2 + 8) * expert_bytes
    assert first.shared.sums.copies == 2 + 8
    assert set(first.shared.plans.values()) == {Lanes.local(2, 8)}
    # No further copies are needed for what was re-routed: it ran at home with the copies of all local.
    second = one["second"]
    assert set(second.shared.lanes.values()) == {Lanes.static(2, 8)} and second.shared.sums.copies == 16
    least_s = sizes.busy_s([[lanes] * 2 for lanes in first.shared.lanes.values()], routed(SETTING, sizes, 1)[0])
    assert first.seconds >= first.trained_s >= least_s
    assert min(first.trans_s) > 0 and min(first.agg_s) > 0
    assert one["sample"].trans_s == first.trans_s[0] and len(one["sample"].forward_s) == 2
    constants = one["constants"]
    assert constants == other["constants"]
    assert (constants.forward_row_s, constants.backward_s, constants.lane_s) == (1e-6, 2e-6, 0.0)
    assert (constants.rest_forward_s, constants.num_micro_batches) == (2e-4, 2)


def test_a_gradient_that_is_not_what_the_lanes_gave_is_an_error() -> None:
    rows = torch.tensor([[3, 1, 0, 2], [5, 1, 0, 2]])
    right = torch.tensor([0.0, 2.0])[:, None, None].expand(2, 3, 5)
    check_gradients([right, right], rows, 1)
    with pytest.raises(RuntimeError, match="rank 1"):
        check_gradients([right, right + torch.eye(3, 5)], rows, 1)


def _measures(_rank: int, folder: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {"replayed": [], "predicted": []}
    replayed.run_rank(found["replayed"].append, SIZES, [SETTING], 1, 1)
    predicted.run_rank(found["predicted"].append, SIZES, [SETTING], 1, 1)
    options = argparse.Namespace(tokens=32, hidden=16, experts=4, repeats=1)
    found["points"] = two_ranks.measure(options)
    found["bytes"] = [memory.counted(folder, "AdamW", weights, 4, 4) for weights in memory.WEIGHTS]
    return found


def test_every_benchmark_runs_on_two_ranks(tmp_path: Path) -> None:
    one, _ = run_ranks(_measures, 2, str(tmp_path))
    [(_, _, measured)] = one["replayed"]
    assert list(measured) == list(replayed.CONTENDERS)
    assert all(len(each.seconds) == 1 and each.seconds[0] >= each.waits_s[0] for each in measured.values())
    for name in ("fastermoe", "pro_prophet", "lanes"):  # after the first of two batches, and the second, for a third
        assert len(measured[name].plan_cpu_s) == 2 * SIZES.blocks
    assert not measured["static"].plan_cpu_s and measured["static"].hidden is None
    constants, *rows = one["predicted"]
    assert isinstance(constants, Constants) and [row.placement for row in rows] == list(replayed.CONTENDERS)
    assert rows[-1].measured_s["all-to-all"] == 0.0 < rows[-1].measured_s["Trans"]
    assert [point.share for point in one["points"]] == list(two_ranks.SHARES)
    assert all(len(point.seconds[way]) == 1 for point in one["points"] for way in two_ranks.WAYS)
    _, text = two_ranks.report(argparse.Namespace(tokens=32, hidden=16, experts=4), one["points"])
    assert "| 2.00 |" in text
    whole, part = one["bytes"]
    numbers = memory.DEPTH * 4 * 2 * memory.HIDDEN**2 * 4  # of all experts
    assert whole["weights"] - part["weights"] == 4 * numbers / 2
    assert whole["optimizer state"] - part["optimizer state"] == 8 * numbers / 2
    assert part["all"] >= part["weights"] + part["optimizer state"] and part["fp32 weights"] == 0


# -- what the tables say ----------------------------------------------------------------------


def test_speedups_and_goals_of_placements() -> None:
    rest_s = SIZES.blocks * SIZES.micro_batches * (1 + BACKWARD) * SIZES.rest_s

    def measured(layers_s: float, hidden: float) -> replayed.Measured:
        seconds = [layers_s + rest_s] * 4
        return replayed.Measured(seconds, seconds, hidden, 1.0, [1.0] * 4, [1.5] * 8, [3.0] * 4, [1e-3], [1e-3], 0.0)

    found = {"static": measured(2.0, 0.5), "lanes": measured(1.25, 0.9), "pro_prophet": measured(1.9, 0.7)}
    found["static"].megabytes = [0.0] * 4
    constants = Constants(forward_row_s=1e-6, row_bytes=1, byte_s=1e-9, expert_bytes=1)
    values, text = replayed.report(SIZES, [(SETTING, constants, found)])
    assert [round(each["layers"]["value"], 3) for each in values["values"]] == [1.0, 1.6, 1.053]
    assert "lanes, drift slow: layers 1.6x (goal 1.3x: reached)" in text
    assert "lanes, drift slow: hidden 90% (goal 80%: reached)" in text
    assert "pro_prophet, drift slow: layers 1.05x (goal 1.15x: not reached)" in text
    assert "pro_prophet, drift slow: hidden 70% (goal 80%: not reached)" in text
    assert values["values"][0]["hidden"] is None


def test_errors_of_predictions_are_over_what_was_measured() -> None:
    told = dict(zip(predicted.PARTS, (1.0, 2.0, 0.0, 0.0, 3.0), strict=True))
    found = dict(zip(predicted.PARTS, (1.25, 2.0, 0.0, 0.001, 4.0), strict=True))
    constants = Constants(forward_row_s=1e-6, row_bytes=1, byte_s=1e-9, expert_bytes=1)
    values, text = predicted.report(SIZES, constants, [predicted.Row(1, 0, "static", told, found)])
    assert values["mean_error"] == {
        "all-to-all": pytest.approx(0.2), "experts": 0.0, "Trans": None, "Agg": None, "whole layer": 0.25
    }  # fmt: skip
    assert "experts: mean error 0.0% (goal 5%: reached)" in text
    assert "whole layer: mean error 25.0% (goal 5%: not reached)" in text


def test_bytes_are_compared_with_the_goal() -> None:
    whole = dict(zip(memory.PARTS, (4.0, 4.0, 8.0, 0.0, 16.0), strict=True))
    rows = [memory.Bytes("AdamW", "replicated", 4, whole), memory.Bytes("AdamW", "sharded", 4, whole | {"all": 4.0})]
    _, text = memory.report([*rows, memory.Transient("local", 0.75, 1.0)])
    assert "AdamW: sharded experts take 0.250" in text and "(goal 1/R = 0.250: reached)" in text
    rows[1] = memory.Bytes("AdamW", "sharded", 4, whole | {"all": 5.0})
    _, text = memory.report([*rows, memory.Transient("local", 0.75, 1.0)])
    assert "(goal 1/R = 0.250: not reached)" in text
    assert "| local | 0.75 | 1.00 |" in text


def test_bytes_of_storages_are_counted_once() -> None:
    one = torch.zeros(10)
    assert memory.num_bytes([one, one[2:], one.view(2, 5), torch.zeros(3, dtype=torch.int64)]) == 40 + 24


def test_tensors_that_are_alive_are_found_with_their_gradients() -> None:
    before = memory.num_bytes(memory.alive())
    parameter = torch.nn.Parameter(torch.zeros(1000))
    parameter.sum().backward()
    assert memory.num_bytes(memory.alive()) - before >= 8000


def test_lanes_are_timed_next_to_experts() -> None:
    costs = list(products.measure(hidden=8, width=16, experts=2, repeats=3))
    assert [(cost.rows, cost.lanes) for cost in costs] == [(r, n) for r in products.ROWS for n in products.LANES]
    assert all(cost.whole_s > 0 and cost.lanes_s > 0 for cost in costs)
    estimate = Estimate(1.04)
    _, text = products.report([products.Cost(128, 2, 1.0, 1.04, estimate, estimate, 1.03)])
    assert "128 rows, 2 lanes an expert: 1.040 (goal 1.05: reached)" in text


def test_contenders_are_planners() -> None:
    loads = [[5, 1, 1, 1], [5, 1, 1, 1]]
    constants = Constants(forward_row_s=1.0, row_bytes=1, byte_s=1e-9, expert_bytes=1)
    for name in replayed.CONTENDERS:
        plan(name, loads, replayed.LayerModel(constants))
