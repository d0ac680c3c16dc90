"""The benchmark of experts' places: what is drawn, who is compared, and what the tables say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.experts import published, tables
from benchmarks.experts.contenders import ALL, LANES, LOCAL, REROUTED, STATIC, TUTEL, fullest_to_all, run, switched
from benchmarks.experts.settings import CLUSTERS, MODELS, Setting
from benchmarks.paper.report import Report
from scenarios.moe.placing import Lanes, LayerModel

SETTING = Setting("M", "HPWNV", 4, 8, 2, 128, "fast")
SMALL = tables.Size(1, 1, (4,), ("S",), 1)


def test_what_is_drawn() -> None:
    batches = list(SETTING.loads(0, 3))
    for loads in batches:
        assert loads.shape == (4, 8) and (loads.sum(axis=1) == 2 * 128).all()
        assert (loads <= 128).all(), "no token chooses an expert twice"
    assert not (batches[0] == batches[1]).all()
    again = replace(SETTING, cluster="LPWNV", agg="chain")
    assert all((a == b).all() for a, b in zip(batches, again.loads(0, 3), strict=True))
    assert not (batches[0] == next(SETTING.loads(1, 1))).all()


def test_the_three_fullest_of_sixteen_have_more_than_half() -> None:
    shares = []
    for layer in range(20):
        rows = np.sort(next(Setting("S", "HPWNV", 16, 16, 1, 1024).loads(layer, 1)).sum(axis=0))[::-1]
        shares.append(rows[:3].sum() / rows.sum())
    assert 0.5 < np.mean(shares) < 0.7


def test_slow_drift_changes_less_than_fast() -> None:
    def change(drift: str) -> float:
        first, second = replace(SETTING, drift=drift, tokens=4096).loads(0, 2)
        return float(np.abs(first.sum(axis=0) - second.sum(axis=0)).sum())

    assert change("slow") < change("fast") / 3


def test_links_between_nodes_are_slower_and_nvlink_helps() -> None:
    plain, linked = CLUSTERS["HPWNV"], CLUSTERS["HPNV"]
    assert plain.byte_s(4) == pytest.approx(1 / 6e9)
    assert plain.byte_s(4) < plain.byte_s(8) < plain.byte_s(32) < 4 / 12.5e9
    assert all(linked.byte_s(ranks) < plain.byte_s(ranks) for ranks in (4, 16, 32))


@pytest.mark.parametrize("overlapped", [False, True])
def test_who_is_compared(overlapped: bool) -> None:
    found = run(SETTING, layers=1, batches=2, overlapped=overlapped)
    assert list(found) == list(ALL)
    for tally in found.values():
        assert len(tally.blocking_s) == len(tally.overlapped_s) == len(tally.plan_s) == 2
        assert all(0 < a <= b for a, b in zip(tally.overlapped_s, tally.blocking_s, strict=True))
    assert found[STATIC].transfers_s == 0 and found[STATIC].copies == [0, 0]
    assert found[LOCAL].copies == [6, 6] and max(found[LOCAL].balance) == 1
    assert found[REROUTED].copies == found[LANES].copies


def test_tutels_switch_looks_at_what_is_communicated() -> None:
    loads = next(SETTING.loads(0, 1))
    constants = SETTING.constants()
    light = LayerModel(replace(constants, expert_bytes=1.0, message_s=0.0))
    assert switched(loads, light) == Lanes.local(4, 8)
    assert switched(loads, LayerModel(constants)) == Lanes.static(4, 8)
    assert TUTEL in ALL


def test_the_fullest_go_to_all() -> None:
    loads = np.array([[1, 9, 2, 5]] * 4)
    assert fullest_to_all(loads, 1) == Lanes.parse("4x4 1@0:0 1@2:2 1@3:3")
    assert fullest_to_all(loads, 4) == Lanes.local(4, 4)


def test_published_figures_are_complete() -> None:
    assert published.TABLE_4.keys() == {(k, model) for k in (1, 2) for model in MODELS}
    assert published.TABLE_5.keys() == published.TABLE_4.keys() - {(1, "L"), (2, "L")}
    assert all(ours > theirs for table in (published.TABLE_4, published.TABLE_5) for theirs, ours in table.values())


def test_what_is_written(tmp_path: Path) -> None:
    tables.large(Report("layers", tmp_path, "performance model", title="Layers"), SMALL)
    text = (tmp_path / "layers.md").read_text(encoding="utf-8")
    assert "**SIMULATION: nothing ran" in text and "| 4 x 8 | around the ring | S | 2 | fast | overlapped |" in text
    values = json.loads((tmp_path / "layers.json").read_text(encoding="utf-8"))["values"]
    assert len(values) == 16
    for row in values:
        assert row["layer"][STATIC] == 1
        assert row["layer"][LANES] >= 0.9 and row["balance"][LANES] <= row["balance"][STATIC] * 1.1
