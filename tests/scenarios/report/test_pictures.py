"""The picture of stage times."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scenarios.report.pictures import DYNAMIC_COLOUR, STATIC_COLOUR, save_comparison, save_workers


def test_both_panels_with_units_and_marks(tmp_path: Path) -> None:
    """Axes have units; both runs and the re-partition are in the legend."""
    path = save_comparison(
        tmp_path / "new" / "picture.svg",
        static_stages_s=[0.3, 0.9],
        dynamic_stages_s=[0.6, 0.6],
        static_batches_s=[2.0, 1.0, 1.0],
        dynamic_batches_s=[2.0, 1.0, 0.7],
        rebalanced_at=[1],
        title="scenario=freezing",
    )
    text = path.read_text(encoding="utf-8")
    comments = re.findall(r"<!-- (.*?) -->", text)  # matplotlib writes every text as a comment
    for label in ("computing time a batch (s)", "time of a batch (s)", "batch", "stage"):
        assert label in comments
    for label in ("static partition", "dynamic partition", "re-partition", "scenario=freezing"):
        assert label in comments
    assert STATIC_COLOUR.lower() in text and DYNAMIC_COLOUR.lower() in text


def test_stages_alone(tmp_path: Path) -> None:
    """Without batch times there is one panel; a PNG is written."""
    path = save_comparison(tmp_path / "p.png", static_stages_s=[1.0], dynamic_stages_s=[1.0])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_same_picture_twice(tmp_path: Path) -> None:
    """Two calls do not share state."""
    first = save_comparison(tmp_path / "a.png", static_stages_s=[1, 2], dynamic_stages_s=[2, 1])
    other = save_comparison(tmp_path / "b.png", static_stages_s=[1, 2], dynamic_stages_s=[2, 1])
    assert first.read_bytes() == other.read_bytes()


def test_other_numbers_of_stages_are_refused(tmp_path: Path) -> None:
    """Both partitions must be of one pipeline."""
    with pytest.raises(ValueError, match="static_stages_s has 2 stages, dynamic_stages_s 1"):
        save_comparison(tmp_path / "p.png", static_stages_s=[1, 2], dynamic_stages_s=[1])


def test_workers(tmp_path: Path) -> None:
    """One batch on two workers, two on one."""
    path = save_workers(
        tmp_path / "new" / "workers.png", workers=[2, 1, 1], batches_s=[1.0, 0.5, 0.4], all_batches_s=[1.0, 0.9, 0.9],
        tokens=100, title="re-packing",
    )
    assert path.read_bytes().startswith(b"\x89PNG")
