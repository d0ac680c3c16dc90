"""The comparison of the scenarios: what is computed from windows, and one tiny run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.record import environment
from benchmarks.scenarios.contenders import (
    EARLY,
    EVERY,
    OURS,
    PARAMETERS,
    SCENARIOS,
    UNIFORM,
    as_values,
    build_runs,
    read_settings,
    settings_of,
    train_in_turns,
)
from benchmarks.scenarios.ideal import batch_s, best, ideal_s, partitions
from benchmarks.scenarios.main import FULL, QUICK, SETTLED_FULL, SETTLED_QUICK, main, report
from benchmarks.scenarios.summary import HEAD, row, summarise
from tests.benchmarks.test_record import IDLE
from tests.distributed.ranks import run_ranks

EQUAL = [[1.0, 2.0]] * 4


def test_a_batch_of_equal_stages_takes_the_closed_form() -> None:
    assert batch_s(EQUAL, (0, 2, 4), 3, [0.5, 0.5]) == pytest.approx((3 + 2 - 1) * 6 + 0.5)


def test_a_frozen_stage_sends_nothing_back() -> None:
    frozen = [[1.0, 0.0], [1.0, 0.0], [1.0, 2.0]]
    # stage 1 is busy from 2 on, three micro-batches of 3 seconds
    assert batch_s(frozen, (0, 2, 3), 3, [0.0, 0.0]) == pytest.approx(2 + 3 * 3)


def test_the_best_partition_is_the_best_of_all() -> None:
    rng = np.random.default_rng(1)
    for num_stages in (2, 3):
        batches = [rng.lognormal(0, 0.7, (7, 2)).tolist() for _ in range(3)]
        chosen = best(batches, 4, num_stages)
        mean = np.mean(batches, axis=0).tolist()
        all_s = {cut: batch_s(mean, cut, 4, [0.0] * num_stages) for cut in partitions(7, num_stages)}
        assert all_s[chosen] == min(all_s.values()) and len(all_s) == {2: 6, 3: 15}[num_stages]


def test_with_many_partitions_the_partitioners_choose() -> None:
    layers = np.random.default_rng(2).lognormal(0, 0.7, (60, 2)).tolist()
    chosen = best([layers], 8, 4)
    uniform_s = batch_s(layers, (0, 15, 30, 45, 60), 8, [0.0] * 4)
    assert batch_s(layers, chosen, 8, [0.0] * 4) < uniform_s


def test_every_micro_batch_counts_by_itself() -> None:
    """Means would hide that the stages are slow in turns."""
    layers = [[[3.0, 1.0], [0.0, 0.0]], [[1.0, 3.0], [0.0, 0.0]]]
    # stage 0: 0 to 3 and 3 to 4; stage 1: 3 to 4 and 4 to 7, by means 2 + 2 * 2 = 6
    assert batch_s(layers, (0, 1, 2), 2, [0.0, 0.0]) == pytest.approx(7)
    assert batch_s([[2.0, 0.0], [2.0, 0.0]], (0, 1, 2), 2, [0.0, 0.0]) == pytest.approx(6)


def test_the_ideal_counts_steps_and_hooks_once() -> None:
    seconds, cut = ideal_s([EQUAL, EQUAL], [[0.5, 0.9], [0.7, 0.5]], [0.1, 0.2], 3)
    assert cut == (0, 2, 4)
    assert seconds == pytest.approx(2 * 24 + 0.5 + 0.5 + 0.3)


OURS_CUTS = [[0, 2, 4]] * 4 + [[0, 1, 4]] * 2  # by batch


def measured(windows_s: list[float], losses: list[float]) -> dict[str, Any]:
    return {
        "windows_s": windows_s, "losses": losses, "hooks_s": [0.0] * 6, "tokens_per_batch": 100,
        "profiling_s": 0.3, "planning_s": 0.2, "migrating_s": 0.5, "layers_s": [EQUAL] * 6,
        "micro_batches_s": [EQUAL] * 6, "steps_s": [[0.0, 0.0]] * 6, "num_micro_batches": 3,
        "boundaries": OURS_CUTS,
    }


def example() -> dict[str, Any]:
    """Windows of two batches; the ideal batch takes 24 s."""
    losses = [1.0, 2.0]
    stays = {"boundaries": [[0, 2, 4]] * 6}
    return {
        "windows": [[0, 2], [2, 4], [4, 6]], "settled": 2, "num_batches": 6,
        "runs": {
            UNIFORM: measured([80.0, 100.0, 60.0], losses) | stays,
            PARAMETERS: measured([80.0, 90.0, 120.0], losses) | stays, OURS: measured([100.0, 50.0, 60.0], losses),
        },
    }


def test_summary() -> None:
    s = summarise(example())
    assert s.best_static == UNIFORM  # 2 and 10/3 tokens/s against 20/9 and 5/3
    assert s.speedup is not None and s.whole_speedup is not None
    assert (s.speedup.value, s.speedup.pairs, s.speedup.low) == (pytest.approx(160 / 110), 2, None)
    assert s.whole_speedup.value == pytest.approx(240 / 210) and s.whole_speedup.low is not None
    assert s.whole_speedup.low < 240 / 210 < (s.whole_speedup.high or 0)
    assert s.share.median == pytest.approx((48 / 50 + 48 / 60) / 2)
    one_side_s = 2 * batch_s(EQUAL, (0, 1, 4), 3, [0.0, 0.0])
    assert s.cut_share.greatest == 1 and s.cut_share.least == pytest.approx(48 / one_side_s) and one_side_s > 48
    assert s.whole_share == pytest.approx(3 * 48 / 210)
    assert s.ideal_tokens_per_s == pytest.approx(200 / 48)
    assert s.overhead == pytest.approx(1.0 / 210)
    assert s.equal_bits


def test_no_speedup_over_the_same_partition() -> None:
    """Ours moved layers before the end, to where the best static run had them all the time."""
    values = example()
    values["runs"][OURS]["boundaries"] = [[0, 1, 4]] * 2 + [[0, 2, 4]] * 4
    s = summarise(values)
    assert s.speedup is None and s.whole_speedup is not None
    cells = row("moe", values)
    assert cells[HEAD.index("ours / best static (95% interval)")] == "same partition: the difference is noise"
    assert cells[HEAD.index("whole run: ours / best static (95% interval)")].startswith("1.14x (")


def test_the_best_interval_is_the_fastest_as_a_whole() -> None:
    values = example()
    assert summarise(values).best_interval is None
    assert row("moe", values)[HEAD.index("whole run: ours / best interval (95% interval)")] == "not run"
    values["runs"][EVERY.format(1)] = measured([70.0, 70.0, 80.0], [1.0, 2.0]) | {"boundaries": [[0, 1, 4]] * 6}
    values["runs"][EVERY.format(4)] = measured([10.0, 10.0, 169.0], [1.0, 2.0]) | {"boundaries": [[0, 1, 4]] * 6}
    s = summarise(values)
    assert s.best_interval == "every 4" and s.over_interval is not None
    assert s.over_interval.value == pytest.approx(189 / 210)
    assert (s.best_static, s.equal_bits) == (UNIFORM, True)
    assert row("moe", values)[HEAD.index("whole run: ours / best interval (95% interval)")].startswith("0.90x (")
    values["runs"][EVERY.format(1)]["losses"] = [1.0, 3.0]
    assert not summarise(values).equal_bits


@pytest.mark.parametrize("interval", ["0", "-1", "x", "1.5"])
def test_a_wrong_interval_is_refused_before_ranks_start(
    interval: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["main", f"--intervals={interval}"])
    with pytest.raises(SystemExit):
        main()
    assert f"'{interval}': must be a number of batches, 1 or more" in capsys.readouterr().err


def test_runs_that_end_too_soon_are_refused_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing could be told of the end: that was an IndexError after training."""
    monkeypatch.setattr("sys.argv", ["main", "--quick", "--only", "moe", "--set", "run.batches=8"])
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err
    assert "run.batches = 8, run.window = 2: no window begins at batch 8 or later" in error
    assert "train more batches, 10 or a few more" in error


def test_other_losses_are_told() -> None:
    values = example()
    values["runs"][PARAMETERS]["losses"] = [1.0, 2.0 + 2**-51]
    assert not summarise(values).equal_bits


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_end_is_after_all_changes(scenario: str) -> None:
    for overrides, settled in ((FULL, SETTLED_FULL), ((*QUICK, *EARLY[scenario]), SETTLED_QUICK)):
        settings = read_settings([f"scenario={scenario}", *overrides])
        known = settings.scenario_settings
        changes = [*known.get("batches", []), known.get("end_batch") or 0, known.get("first_batch") or 0]
        assert max(changes) < settled
        assert sum(window.start >= settled for window in settings.run.windows()) >= 5
        static, moves = settings_of(UNIFORM, settings)
        assert (static.partition_method, moves, static.scenario) == ("uniform", False, scenario)
        fixed, moves = settings_of(EVERY.format(4), settings)
        assert (fixed.partition_method, moves) == ("parameters", True)
        assert fixed.deepspeed["dynamic_pipeline"] == {**settings.deepspeed["dynamic_pipeline"], "rebalance_every": 4}


TINY = (
    "scenario=freezing", "model=gpt_tiny", "run.batches=8", "run.window=2", "ds.gradient_accumulation_steps=2",
    "scenario.batches=[2]", "scenario.frozen=[0.5]", "ds.dynamic_pipeline.rebalance_every=3",
    "ds.dynamic_pipeline.min_gain=0",
    "ds.dynamic_pipeline.schedule=1f1b",  # a trial's profile tells the whole backwards only
)


def train_tiny(_: int) -> dict[str, Any]:
    settings = read_settings(TINY)
    runs = build_runs(settings, [1, 1])
    train_in_turns(runs, settings)
    windows = [[w.start, w.stop] for w in settings.run.windows()[1:]]
    return {
        "windows": windows, "settled": 4, "num_batches": 8,
        "runs": {name: as_values(run) for name, run in runs.items()},
    }


def test_a_tiny_run(tmp_path: Path) -> None:
    values, other = run_ranks(train_tiny, 2)
    assert list(values["runs"]) == [UNIFORM, OURS, EVERY.format(1)]  # by parameters the cut is the same
    ours = values["runs"][OURS]
    assert ours["boundaries"] == other["runs"][OURS]["boundaries"]
    means_s = np.mean(ours["micro_batches_s"], axis=3)
    assert means_s == pytest.approx(np.array(ours["layers_s"]), rel=1e-3, abs=1e-6), "the profile's means"
    assert len(ours["windows_s"]) == 3 and len(ours["layers_s"]) == 8 and len(ours["hooks_s"]) == 8
    summary = summarise(values)
    assert summary.equal_bits and 0 < summary.share.least <= summary.share.greatest < 1
    assert summary.share.least < summary.cut_share.least <= summary.cut_share.greatest <= 1
    scenarios = {"freezing": json.loads(json.dumps(values))}
    report({"environment": environment(reading=IDLE), "scenarios": scenarios}, tmp_path)
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == ["layers_freezing.png", "scenarios.png", "timeline_freezing.png"]
    page = (tmp_path / "scenarios.md").read_text()
    assert "the same cut" in page and page.count("(every 1)") == 1
