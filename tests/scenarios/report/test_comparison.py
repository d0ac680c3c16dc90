"""The table that sets two runs side by side."""

from __future__ import annotations

import math
from dataclasses import replace

from scenarios.report.comparison import (
    RunSummary,
    comparison_table,
    first_difference,
    perplexity,
    same_bits,
    speedup,
)

BATCHES = [1.2, 1.3, 1.2, 1.3]  # what the static run takes longer, by window
STATIC = RunSummary(
    label="static", tokens=1000, seconds=10.0, losses=(5.5, 2.5), boundaries=(0, 7, 14),
    windows=tuple((2 * i, 2, 2 * ratio) for i, ratio in enumerate(BATCHES, start=1)), partitions=((0, (0, 7, 14)),),
    bubble_ratio=0.3, imbalance=0.5, last_tokens_per_s=110.0, notes={"frozen layers": "7 of 14"},
)  # fmt: skip
DYNAMIC = RunSummary(
    label="dynamic", tokens=1000, seconds=8.0, losses=(5.5, 2.5), boundaries=(0, 9, 14),
    bubble_ratio=0.125, imbalance=0.25, profiling_s=0.04, planning_s=0.008, migrating_s=0.4, num_rebalances=2,
    windows=tuple((2 * i, 2, 2.0) for i, _ in enumerate(BATCHES, start=1)),
    partitions=((0, (0, 7, 14)), (4, (0, 8, 14)), (6, (0, 9, 14))),
    last_tokens_per_s=1650.0, notes={"frozen layers": "7 of 14"},
)  # fmt: skip


def rows(table: str) -> dict[str, list[str]]:
    """Take a table apart: first cell to the other cells."""
    lines = [line for line in table.splitlines() if not line.startswith("-")]
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_the_order_at_the_end() -> None:
    """Where both runs know it."""
    known = replace(STATIC, orders=((0, "1F1B"),)), replace(DYNAMIC, orders=((0, "1F1B"), (5, "planned")))
    assert rows(comparison_table(*known))["order at the end"] == ["1F1B", "planned"]


def test_comparison() -> None:
    """Every figure that a reader of a run wants."""
    found = rows(comparison_table(STATIC, DYNAMIC))
    assert found == {
        "static": ["dynamic"],
        "throughput (tokens/s)": ["100", "125"],
        "speedup (95% interval)": ["1.25x (1.16 to 1.34)"],
        "in the last 3 windows": ["110", "1,650"],
        "speedup there": ["1.27x (1.12 to 1.41)"],
        "bubble ratio (idle share)": ["30.0 %", "12.5 %"],
        "imbalance of stages' loads": ["50.0 %", "25.0 %"],
        "time spent profiling": ["0.00 %", "0.50 %"],
        "time spent planning": ["0.00 %", "0.10 %"],
        "time spent migrating": ["0.00 %", "5.00 %"],
        "re-partitions": ["0", "2"],
        "stage boundaries at the end": ["[0 7 14]", "[0 9 14]"],
        "first loss": ["5.500000", "5.500000"],
        "final loss": ["2.500000", "2.500000"],
        "losses of all batches": ["equal bits (2)"],
        "frozen layers": ["7 of 14", "7 of 14"],
    }


def test_validation() -> None:
    """Last loss, its perplexity, and whether all evaluations have equal bits."""
    static, dynamic = (replace(run, validation_losses=(5.5, 2.0)) for run in (STATIC, DYNAMIC))
    found = rows(comparison_table(static, dynamic))
    assert found["validation loss"] == ["2.000000", "2.000000"]
    assert found["validation perplexity"] == ["7.39", "7.39"]
    assert found["validation losses"] == ["equal bits (2)"]
    found = rows(comparison_table(replace(static, validation_losses=(5.5, math.nextafter(2.0, 3))), dynamic))
    assert found["validation losses"] == ["DIFFER from evaluation 1"]
    assert rows(comparison_table(STATIC, dynamic))["validation perplexity"] == ["n/a", "7.39"]
    assert perplexity(1000.0) == math.inf and math.isnan(perplexity(math.nan))


def test_different_losses_are_loud() -> None:
    """The first batch with another loss is named."""
    other = RunSummary(**{**DYNAMIC.__dict__, "losses": (5.5, math.nextafter(2.5, 3)), "notes": {}})
    found = rows(comparison_table(STATIC, other))
    assert found["losses of all batches"] == ["DIFFER from batch 1"]
    assert found["frozen layers"] == ["7 of 14", "n/a"]


def test_runs_without_measurements() -> None:
    """Nothing trained, nothing profiled: no division by zero."""
    empty = RunSummary(label="static", tokens=0, seconds=0.0, losses=(), boundaries=(0, 1))
    found = rows(comparison_table(empty, empty))
    assert found["bubble ratio (idle share)"] == ["n/a", "n/a"]
    assert found["speedup (95% interval)"] == found["speedup there"] == ["n/a"]
    assert found["first loss"] == ["n/a", "n/a"]
    assert found["final loss"] == ["nan", "nan"]


NOISE = "same partition: the difference is noise"


def told(static: RunSummary, dynamic: RunSummary) -> tuple[str, str]:
    """What is said of the speedup, and of that at the end."""
    found = rows(comparison_table(static, dynamic))
    return found["speedup (95% interval)"][0], found["speedup there"][0]


def test_no_speedup_where_no_layer_moved() -> None:
    """However much faster one of the runs was: 1.54x once, on a busy machine."""
    stayed = replace(DYNAMIC, boundaries=(0, 7, 14), num_rebalances=0, partitions=((0, (0, 7, 14)),))
    assert told(STATIC, stayed) == (NOISE, NOISE) and speedup(STATIC, stayed) is None
    assert "1.25" not in comparison_table(STATIC, stayed) and "125" in comparison_table(STATIC, stayed)
    other_cut = replace(stayed, boundaries=(0, 6, 14), partitions=((0, (0, 6, 14)),))  # partition=uniform, say
    assert told(STATIC, other_cut) == ("1.25x (1.16 to 1.34)", "1.27x (1.12 to 1.41)")


def test_only_timed_batches_count() -> None:
    """A layer that came back before the last windows, or that moved when all was over."""
    losses = tuple(range(10))
    away = ((0, (0, 7, 14)), (3, (0, 8, 14)), (4, (0, 7, 14)))
    back = replace(DYNAMIC, losses=losses, boundaries=(0, 7, 14), partitions=away)
    assert told(STATIC, back) == ("1.25x (1.16 to 1.34)", NOISE)
    same = {"losses": losses, "boundaries": (0, 7, 14), "partitions": ((0, (0, 7, 14)),)}
    ordered = replace(DYNAMIC, **same, orders=((0, "1F1B"), (5, "planned")))
    assert NOISE not in told(STATIC, ordered), "another order on the same partition"
    assert told(STATIC, replace(ordered, orders=((0, "planned"), (2, "1F1B")))) == (NOISE, NOISE), "before it was timed"
    in_warmup = replace(back, partitions=((0, (0, 8, 14)), (2, (0, 7, 14))))
    assert told(STATIC, in_warmup) == (NOISE, NOISE)
    too_late = replace(DYNAMIC, losses=losses, num_rebalances=1, partitions=((0, (0, 7, 14)), (10, (0, 9, 14))))
    assert told(STATIC, too_late) == (NOISE, NOISE)


def test_runs_that_were_continued_are_compared_where_both_were_timed() -> None:
    """After it was continued, each run's first window is a warm-up; here those differ."""
    dynamic = replace(DYNAMIC, windows=((2, 2, 2.0), (6, 1, 9.0), (8, 2, 2.0)))
    found = speedup(STATIC, dynamic)
    assert found is not None and found.pairs == 2 and found.low is None
    assert told(STATIC, dynamic)[0] == "1.25x (no interval)"


def test_older_results_are_shown_without_an_interval() -> None:
    """They know neither windows nor partitions, but whether layers moved."""
    old_static, old = (replace(run, windows=(), partitions=()) for run in (STATIC, DYNAMIC))
    assert told(old_static, old) == ("1.25x (no interval)", "15.00x (no interval)")
    assert "in the last window" in rows(comparison_table(old_static, old))
    back = replace(old, boundaries=(0, 7, 14))
    assert told(old_static, back) == ("1.25x (no interval)", NOISE)
    assert told(old_static, replace(back, num_rebalances=0)) == (NOISE, NOISE)


def test_same_bits() -> None:
    """Bits, not values."""
    assert same_bits([1.0, math.nan], [1.0, math.nan])
    assert not same_bits([0.0], [-0.0])
    assert not same_bits([1.0], [1.0, 2.0])
    assert not same_bits([0.1 + 0.2], [0.3])
    assert first_difference([1.0, 2.0], [1.0, 2.0]) is None
    assert first_difference([1.0, 2.0], [1.0, 3.0]) == 1
    assert first_difference([1.0], [1.0, 3.0]) == 1
