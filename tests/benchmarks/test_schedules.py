"""The benchmark of orders: what is simulated, and what its tables say."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.replay.case import WARM_UP, Case, Result
from benchmarks.schedules import real, replayed
from benchmarks.schedules.on_paper import (
    CHARGED,
    LEAST,
    MESSAGES,
    ORDER,
    PLANNED,
    SPLIT,
    TODAY,
    TOGETHER,
    UNIFORM,
    on_paper,
)

CASE = Case("model:early_exit:12", "static uniform", 4, 8, 6, 30.0)


@pytest.fixture(scope="module")
def row() -> replayed.Row:
    """Simulated, and runs as an engine might have made them."""
    paper = on_paper(CASE)

    def run(method: str, wall_s: float) -> Result:
        told_s = [wall_s / 5] * CASE.num_batches
        return Result(
            replace(CASE, method=method), "replay", wall_s, [wall_s / 4] * 6, [0.2] * 6, [], [], 0.0, 0.0, 0.0, 1.0, [],
            losses=[1.0], told_s=told_s, num_orders=2,
        )  # fmt: skip

    seconds = zip(replayed.ON_ENGINE, (12.0, 10.0, 8.0, 7.5), strict=True)
    return replayed.Row(CASE, paper, {method: run(method, wall_s) for method, wall_s in seconds})


def test_each_part_gains_by_itself_and_nothing_beats_the_work(row: replayed.Row) -> None:
    seconds = {name: one.seconds for name, one in row.paper.items()}
    assert seconds[UNIFORM] > seconds[TODAY] > seconds[MESSAGES] > max(seconds[SPLIT], seconds[ORDER])
    assert min(seconds[SPLIT], seconds[ORDER]) > seconds[PLANNED] >= seconds[TOGETHER] > seconds[LEAST]
    total = 0.0
    for batch in range(WARM_UP, CASE.num_batches):
        moment = CASE.load_trace().at(batch, CASE.num_batches)
        factors = CASE.micro_batch_factors(moment, batch)
        total += sum(s * f for s, f in zip(moment.seconds, factors.sum(axis=1), strict=True))
    assert seconds[LEAST] == pytest.approx(total / CASE.num_stages)


def test_what_is_charged_is_what_deepspeed_takes_besides_layers_and_messages(row: replayed.Row) -> None:
    costs = CASE.known_costs()
    slowest_s = CASE.num_micro_batches * (costs.forward_s + costs.backward_s)  # a stage that computes all the time
    per_batch_s = (row.paper[CHARGED].seconds - row.paper[TODAY].seconds) / (CASE.num_batches - WARM_UP)
    assert slowest_s < per_batch_s - costs.step_s - costs.batch_s < 2 * slowest_s


def test_messages_that_take_no_time_gain_nothing() -> None:
    paper = on_paper(replace(CASE, costs="none"))
    assert paper[TODAY].seconds == pytest.approx(paper[MESSAGES].seconds) == paper[CHARGED].seconds


def test_gains_are_told_with_their_goals(row: replayed.Row, tmp_path: Path) -> None:
    assert row.gain == 10.0 / 8.0 and row.as_told == pytest.approx(4 / 5)
    assert row.whole_gain == row.gain * row.paper[TODAY].seconds / row.paper[MESSAGES].seconds > row.gain
    waited = replace(row, waited=replace_wall(row.runs[replayed.USUAL_RUN], 11.0))
    assert waited.gain == waited.whole_gain == 11.0 / 8.0
    replayed.report([row], tmp_path, "replay", None, quick=True)
    text = (tmp_path / "virtual_quick.md").read_text()
    assert "goal 1.07x: reached" in text and "80.0% of what was simulated (goal 97%: not reached)" in text
    assert "Gradients of weights are 50% of each layer's backward" in text
    (values,) = json.loads((tmp_path / "virtual_quick.json").read_text())["values"]
    assert values["gain"] == row.gain and set(values["engine"]) == set(row.runs)


def replace_wall(run: Result, wall_s: float) -> Result:
    return Result.from_values(run.as_values() | {"wall_s": wall_s})


def test_real_runs_are_compared_batch_by_batch_or_in_windows() -> None:
    def run(seconds: float) -> dict[str, Any]:
        return {"batches_s": [9.0] * 2 + [seconds] * 8, "losses": [1.0], "bubbles": [0.2] * 10, "split": [True] * 10}

    windows = [[2, 4], [4, 6], [6, 8], [8, 10]]
    told = {"model": "8 x 512, 4", "windows": windows}
    freezing = {**told, "scenario": "freezing", "runs": {real.USUAL: run(2.0), real.AUTO: run(1.6)}}
    none = {**told, "scenario": "none", "runs": {
        real.OWN: run(2.0), real.USUAL: run(2.0), real.AUTO: run(1.95), real.ROOMY: run(1.9),
    }}  # fmt: skip
    assert {name: gain.value for name, gain in real.gains(freezing).items()} == {real.AUTO: 1.25}
    found = real.gains(none)
    assert math.isclose(found[real.AUTO].value, 2.0 / 1.95) and found[real.USUAL].value == 1.0
    lines = real.text([freezing, none]).splitlines()
    [line] = [line for line in lines if line.startswith("| freezing")]
    assert "1.250x" in line and "20.0%" in line and "1.03x: reached" in line
    assert sum("reached" in line and "not reached" not in line for line in lines if line.startswith("| none")) == 3


def test_the_same_runs_on_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No ranks: the balancer decides, the simulator runs."""
    from benchmarks.schedules.__main__ import main

    options = ["--paper", "--stages", "4", "--batches", "8", "--only", "pruning"]
    monkeypatch.setattr("sys.argv", ["schedules", *options, "--out", str(tmp_path), "--raw", str(tmp_path)])
    main()
    text = (tmp_path / "paper.md").read_text()
    assert "SIMULATION" in text and "| whole run, dynamic, `schedule: auto` |" in text and "equal bits" not in text
    assert len((tmp_path / "paper.jsonl").read_text().splitlines()) == len(replayed.ON_ENGINE)
