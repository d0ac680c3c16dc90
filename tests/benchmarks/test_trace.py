"""The trace format."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.traces import Source, Trace, TraceBatch

SOURCE = Source("model", "two layers, made up for a test")


def made(*batches: TraceBatch, num_batches: int = 10) -> Trace:
    return Trace("small", SOURCE, ("a", "b"), num_batches, batches)


FIRST = TraceBatch(0, (1.0, 2.0), (2.0, 4.0), (8, 16))
LATER = TraceBatch(5, (1.0, 0.5), (0.0, 1.0), (8, 4), frozen_layers=1, dispersion=(0.0, 0.1))


def test_a_file_reads_back_equal(tmp_path: Path) -> None:
    trace = made(FIRST, LATER)
    assert Trace.load(trace.save(tmp_path / "deep" / "t.json")) == trace


@pytest.mark.parametrize(("batch", "num_batches", "expected"), [
    (0, None, FIRST), (4, None, FIRST), (5, None, LATER), (9, None, LATER),
    (1, 4, FIRST), (2, 4, LATER),  # squeezed to four batches
    (49, 100, FIRST), (50, 100, LATER),  # stretched to a hundred
])
def test_a_moment_holds_until_the_next(batch: int, num_batches: int | None, expected: TraceBatch) -> None:
    assert made(FIRST, LATER).at(batch, num_batches) == expected


def test_scaling_changes_seconds_alone() -> None:
    scaled = made(FIRST, LATER).scaled(0.5)
    assert scaled.batches[0].seconds == (1.5, 3.0)
    assert scaled.batches[1].parameter_bytes == (8, 4)
    assert scaled.mean_layer_s() == 2.25


@pytest.mark.parametrize(("changes", "message"), [
    ({"forward_s": (1.0,)}, "different lengths"),
    ({"forward_s": (1.0, -1.0)}, "forward_s must be finite numbers >= 0"),
    ({"backward_s": (1.0, float("nan"))}, "backward_s must be finite"),
    ({"frozen_layers": 1}, "frozen layers must have no backward"),
    ({"frozen_layers": 3}, "frozen_layers = 3 of 2"),
    ({"dispersion": (0.1,)}, "different lengths"),
])
def test_an_impossible_batch_is_refused(changes: dict, message: str) -> None:
    values = {"batch": 0, "forward_s": (1.0, 2.0), "backward_s": (2.0, 4.0), "parameter_bytes": (8, 16)}
    with pytest.raises(ValueError, match=message):
        TraceBatch(**(values | changes))


def test_batches_must_rise_from_zero() -> None:
    for batches in ((LATER,), (FIRST, FIRST), ()):
        with pytest.raises(ValueError, match="must rise from 0"):
            made(*batches)
    with pytest.raises(ValueError, match="stay below num_batches = 5"):
        made(FIRST, LATER, num_batches=5)


def test_a_source_says_where_from() -> None:
    with pytest.raises(ValueError, match="must be one of cpu, gpu, model"):
        Source("tpu", "x")
    with pytest.raises(ValueError, match="say where the numbers are from"):
        Source("cpu", " ")


@pytest.mark.parametrize(("key", "value", "message"), [
    ("format", "other", 'must have "format"'), ("version", 99, "record the trace again"), ("extra", 1, "extra"),
])
def test_a_foreign_file_is_refused_by_name(tmp_path: Path, key: str, value: object, message: str) -> None:
    path = made(FIRST).save(tmp_path / "t.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(ValueError, match=rf"t\.json: not a valid trace: .*{message}"):
        Trace.load(path)
