"""What the table of regrets says of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner import first_cut, regret
from benchmarks.replay.case import ORDERS, OURS, Case, Method
from benchmarks.replay.predict import predict
from benchmarks.schedules.on_paper import MESSAGES, TOGETHER, on_paper
from tests.matrix import mostly


def rows() -> list[regret.Row]:
    case = Case("model:pruning:8", regret.AUTO, 2, 8, 24, 15.0)
    return [regret.measure(case, plans_orders=plans) for plans in (False, True)]


def test_all_contenders_run_and_are_compared() -> None:
    for row in rows():
        assert row.static.wall_s / row.auto.wall_s == row.over_static > 1.02
        assert row.share is not None and row.share > 0.9 and row.holds
        assert row.regret > 0, "hindsight pays for nothing"
        assert not row.static.moves and row.fixed.moves and row.auto.moves
    text = regret.text_of(rows())
    assert "| 1F1B | 2 | pruning |" in text and "| planned | 2 |" in text


def test_a_loss_is_shown() -> None:
    row = rows()[0]
    slow = replace(row, auto=replace(row.auto, wall_s=1.02 * row.fixed.wall_s))
    assert not slow.holds and "**below**" in regret.text_of([slow])
    assert "in 0 of 1 rows" in regret.notes([slow])[0]
    each = replace(row, auto=replace(row.auto, wall_s=row.intervals[1].wall_s))
    assert "every 4: mean 1.000, 1.000 to 1.000" in regret.notes([each, each])[2]
    nothing = replace(row, intervals=(row.static,) * 3, auto=replace(row.auto, wall_s=row.static.wall_s))
    assert nothing.share is None and nothing.holds
    assert "No interval gains anything." in regret.notes([nothing])[1]


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), mostly([(4, 16), (8, 32)], [(4, 16)]))
def test_a_model_that_changes_in_every_batch_is_followed(num_stages: int, num_micro_batches: int) -> None:
    """Tokens leave within few batches, and every batch is much shorter than the one before: that is no noise."""
    auto, fixed = (
        predict(Case("model:early_exit_cost:24", label, num_stages, num_micro_batches, 20, 30.0))
        for label in (regret.AUTO, regret.FIXED)
    )
    assert fixed.wall_s / auto.wall_s > 0.97


def test_a_gain_beyond_the_noise_is_not_waited_for() -> None:
    """Where the batches before tell nothing of the present ones, as tokens leave while layers vary a little."""
    [case] = regret.cases([4], 60, ["early_exit"], halves=False, jitter=0.05)
    auto_s, fixed_s = (
        sum(predict(replace(case, seed=seed, method=f"{label}, auto order", every=1)).wall_s for seed in range(3))
        for label in (regret.AUTO, regret.FIXED)
    )
    assert fixed_s / auto_s > 0.993


def test_cases_cover_all_sizes() -> None:
    found = list(regret.cases([2, 8], 60, ["moe"], halves=True, jitter=0.1))
    assert [(case.num_stages, case.trace, case.jitter) for case in found] == [
        (2, "model:moe:24:halves", 0.1), (8, "model:moe:24:halves", 0.1),
    ]  # fmt: skip


def test_the_command_writes_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = "regret --stages 2 --scenarios mod --batches 6 --orders 1f1b --processes 1 --out"
    monkeypatch.setattr("sys.argv", [*arguments.split(), str(tmp_path)])
    regret.main()
    assert "| 1F1B | 2 | mod |" in (tmp_path / "regret_6_of_2.md").read_text()


@pytest.mark.parametrize("trace", ["model:pruning:8", "model:early_exit:8"])
def test_what_is_the_same_in_the_next_batch_is_worked_out_once(
    trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the run is the same to the last bit."""
    case = Case(trace, ORDERS[1].label, 2, 8, 24, 15.0)
    first, paper = predict(case), on_paper(case)
    monkeypatch.setattr(Case, "varies_in", lambda self, moment: True)
    again = predict(case)
    assert (again.batches_s, again.bubbles, again.moves) == (first.batches_s, first.bubbles, first.moves)
    assert on_paper(case) == paper
    assert on_paper(case, (TOGETHER,)) == {TOGETHER: paper[TOGETHER]}


def test_some_batches_with_hindsight_stand_for_all() -> None:
    case = Case("model:pruning:8", ORDERS[1].label, 2, 8, 24, 15.0)
    every = on_paper(case, (MESSAGES,))[MESSAGES]
    assert on_paper(case, (MESSAGES,), most_batches=22) == {MESSAGES: every}, "all that are timed"
    some = on_paper(case, (MESSAGES,), most_batches=8)[MESSAGES]
    assert some != every and some.seconds == pytest.approx(every.seconds, rel=0.1)


@pytest.mark.parametrize("method", [OURS[1], ORDERS[1]], ids=["1f1b", "planned"])
@pytest.mark.parametrize("scenario", ["pruning", "freezing", "mod"])
def test_a_bad_first_cut_is_left_after_three_batches(scenario: str, method: Method) -> None:
    """DeepSpeed's cut by parameters, with an embedding as large as four blocks."""
    row = first_cut.measure(Case(f"model:{scenario}:24", method.label, 4, 16, 60, 30.0))
    assert row.first_s > 0.15, "else the cut would not be bad"
    assert row.left_after == 3 and row.lost_batches < 1.0
    assert "| 4 |" in first_cut.text_of([row])
