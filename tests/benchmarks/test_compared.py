"""All contenders on paper, and the pages beside the paper's figures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paper import compared, listed, published, unstable, verdicts
from benchmarks.paper.contenders import (
    ALL,
    BEST_STATIC,
    CUT,
    DENSE,
    DIFFUSION_T,
    IDEAL,
    LEAST,
    ORDER,
    PARTITION_P,
    PARTITION_T,
    RECUT,
    best_recut,
    case_of,
    outcome,
)
from benchmarks.paper.report import Report
from benchmarks.paper.verbatim import run_diffusion
from benchmarks.replay.case import Case
from benchmarks.replay.predict import predict


@pytest.fixture(scope="module")
def row() -> compared.Row:
    return compared.Size("freezing", "cost", 24, 4).run()


def test_settings_are_the_papers() -> None:
    case = case_of("pruning", "equation", 32, 8)
    assert (case.num_micro_batches, case.num_batches, case.every) == (32, 100, 23)
    assert case_of("freezing", "cost", 24, 2).every == 3 and case_of("early_exit", "cost", 24, 2).every == 1
    assert (case_of("mod", "cost", 24, 24).num_batches, case_of("mod", "cost", 24, 24).every) == (40, 1)
    sizes = compared.full_sizes()
    assert {(s.blocks, s.num_stages) for s in sizes if s.num_stages <= 8} == {
        (blocks, stages) for blocks in compared.DEPTHS for stages in (2, 4, 8)
    }
    assert {s.blocks for s in sizes if s.num_stages == 24} == set(published.DEPTHS)
    assert {(s.blocks, s.num_stages) for s in sizes if s.scenario == "moe"} == {(32, 16)}


def test_contenders_stand_in_the_order_that_they_must(row: compared.Row) -> None:
    assert set(row.outcomes) == set(ALL) and row.last(BEST_STATIC) == 1.0
    assert row.last(DENSE) < 1.0, "the frozen model is faster than the dense one"
    for label in ALL:
        assert row.last(label) <= row.last(LEAST), label
        if label not in (LEAST, IDEAL, ORDER, "ours: split blocks", DIFFUSION_T):
            assert row.last(label) <= 1.001 * row.last(IDEAL), label
    assert row.last(CUT) > 1.2 and row.last(ORDER) > row.last(CUT)
    assert row.last(PARTITION_P) == pytest.approx(1.0, abs=0.01), "frozen layers keep their parameters"
    assert row.last(PARTITION_T) == pytest.approx(row.last(CUT), abs=0.03)
    assert row.outcomes[BEST_STATIC].imbalance > 3 * row.outcomes[PARTITION_T].imbalance


def test_diffusion_as_printed_gains_and_scatters(row: compared.Row) -> None:
    found = row.outcomes[DIFFUSION_T]
    assert found.hops > 3 and found.moves > 0 and row.last(DIFFUSION_T) > 1.1


def test_diffusion_that_moves_nothing_is_the_static_run() -> None:
    """The same batches, costs and profiles as the engine's balancer on paper, but for the last messages of a batch."""
    case = Case("model:dense:8", "static uniform", 4, 16, 10, 30.0, every=3)
    mine, told = run_diffusion(case, "time"), predict(case)
    assert mine.moves == 0 and mine.hops == 3
    decisions_s = 3 * case.known_costs().work_s["decide"]
    assert mine.whole_s == pytest.approx(told.wall_s + decisions_s, rel=2e-3)


def test_one_recut_is_as_good_as_any_single_one() -> None:
    case = case_of("freezing", "cost", 24, 4)
    found = best_recut(case)
    assert found.moves <= 1
    static = outcome(case, BEST_STATIC)
    assert found.whole_s < 0.97 * static.whole_s
    assert found.whole_s > 0.99 * outcome(case, IDEAL).whole_s
    dense = best_recut(replace(case, trace="model:dense:24"))
    assert dense.moves == 0


def test_an_unknown_contender_is_named() -> None:
    with pytest.raises(ValueError, match="label = 'theirs': must be one of dense model"):
        outcome(case_of("pruning", "cost", 24, 2), "theirs")


def test_verdicts() -> None:
    assert verdicts.verdict(1.2, 1.3, 2.0) == "beaten" and verdicts.verdict(1.2, 1.19, 2.0) == "met"
    assert verdicts.verdict(1.5, 1.3, 2.0) == "missed"
    assert verdicts.verdict(2.3, 1.3, 2.0) == "missed; more than all work / stages would give here"


def test_the_table_says_what_can_not_be_compared(tmp_path: Path, row: compared.Row) -> None:
    eight = compared.Row(replace(row.size, num_stages=8), 32, row.outcomes)
    compared.compared(Report("compared", tmp_path, "simulation"), [eight])
    text = (tmp_path / "compared.md").read_text()
    assert "can't be compared: over Egeria" in text and "Tutel is not here" in text
    assert "rows of the full set are not in this table" in text
    pruned = compared.Row(replace(eight.size, scenario="pruning"), 32, row.outcomes)
    lines = [line for line in verdicts.text([pruned]).splitlines() if line.startswith("| pruning | 24")]
    assert ["static, pruned" in lines[0], "static, not pruned" in lines[1]] == [True, True] and len(lines) == 2
    assert "cost: missed" in verdicts.notes([pruned])[0]
    (values,) = json.loads((tmp_path / "compared.json").read_text())["values"]
    assert values["last"][RECUT] > 1.1 and set(values["whole"]) == set(ALL)


def test_rows_are_kept_and_read_back(tmp_path: Path, row: compared.Row, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = tmp_path / "raw.jsonl"
    sizes = [compared.Size("pruning", "cost", 24, 2, labels=(BEST_STATIC, CUT))]
    first = compared.run(sizes, raw)
    monkeypatch.setattr(compared.Size, "run", lambda size: pytest.fail("made again"))
    assert compared.run(sizes, raw)[0].values() == first[0].values()


def test_ceilings_of_one_node_are_those_of_whole_blocks() -> None:
    ceilings = [round(compared.ceiling_by_formula(blocks, 8), 2) for blocks in compared.DEPTHS]
    assert ceilings == pytest.approx([1.26, 1.28, 1.32, 1.35, 1.34], abs=0.011)


def test_pages_that_need_no_run(tmp_path: Path) -> None:
    listed.all_published(Report("published", tmp_path, "quoted"))
    text = (tmp_path / "published.md").read_text()
    assert "| early_exit | 48 | 4.83x | no early exit | DynMo, Figure 3 |" in text and "n/a" not in text
    assert all(line in text for line in published.CONTRADICTIONS)
    listed.balancers(Report("balancers", tmp_path, "simulation"), quick=True)
    values = json.loads((tmp_path / "balancers.json").read_text())["values"]
    best = {v["algorithm"]: v["bottleneck"] for v in values if v["costs"].startswith("log-normal")}
    assert best["optimal"] == pytest.approx(1.0) and best["partition"] == pytest.approx(1.0, abs=1e-3)
    assert best["diffusion as printed"] < best["contiguous diffusion"] < best["uniform"]


def test_gains_are_compared_with_the_calm_network() -> None:
    def value(share: float, gain: float, varies: bool = False) -> dict[str, object]:
        return {"scenario": "s", "share": share, "varies": varies, "gains": dict.fromkeys(unstable.CONTENDERS, gain)}

    lines = unstable.conclusions([value(0.0, 1.2), value(0.1, 1.3), value(0.1, 1.1, True)])
    assert lines[0].startswith("partition:time: the gain is larger than without delays in 1 of 2 networks (0 of 1 that")


def test_delays_slow_the_static_pipeline_and_are_the_same_for_all() -> None:
    case = replace(case_of("pruning", "cost", 24, 4), costs="none")
    calm, slow = (unstable.seconds_of(case, unstable.Condition(share, share > 0)) for share in (0.0, 0.5))
    assert all(calm[label] <= slow[label] for label in unstable.CONTENDERS)
    assert calm[unstable.PRINTED] == calm[unstable.COUNTED]
    links = unstable.Condition(0.5, True).links_s(case, 3)
    assert links.shape == (2, 25, 16) and links.max() <= 4 * unstable.Condition(0.5).mean_s(case) and links.min() == 0
