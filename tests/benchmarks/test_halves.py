"""Halves of blocks over whole ones, in whole runs on paper."""

from __future__ import annotations

import pytest

from benchmarks.planner import halves


def test_nothing_changes_where_nothing_can_be_spread() -> None:
    """One stage holds all, whatever the layers; halves cost a profile of twice as many."""
    assert halves.gain(("1x2", "pruning", 6)) == pytest.approx(1.0, rel=0.01)


def test_the_command_prints_its_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", "halves --sizes 2x2 --batches 6 --processes 1".split())
    halves.main()
    [*_, line] = capsys.readouterr().out.splitlines()
    name, middle, least, most = (cell.strip() for cell in line.strip("|").split("|"))
    assert name == "2 × 2" and float(least) <= float(middle) <= float(most)
