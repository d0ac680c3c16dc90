"""Two runs of one job side by side, as a table: figures, overheads, and whether their losses have equal bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dynpipe_ds.reporting import format_table
from scenarios.report.interval import SAME_PARTITION, Estimate, ratio_of_totals

T = TypeVar("T")
UNKNOWN = "n/a"
LAST_WINDOWS = 3
"""Timed windows at the end that are looked at by themselves: as many as an interval needs."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """What is known of one run; the timed batches only, where seconds are concerned.

    Attributes:
        label: name of the run, the column's head.
        tokens: tokens trained on in the timed batches, over all replicas.
        seconds: wall-clock time of the timed batches.
        losses: loss of every batch, the untimed ones too.
        boundaries: stage boundaries at the end of the run.
        bubble_ratio: idle / (idle + busy), mean over stages and timed batches; ``None`` if unknown.
        imbalance: (largest - least load of a stage) / mean load, mean over timed batches; ``None`` if unknown.
        profiling_s: time spent on profiling, on the rank where it was most.
        planning_s: same, for planning.
        migrating_s: same, for moving layers.
        last_tokens_per_s: throughput of the last timed windows alone; ``None`` if unknown.
        num_rebalances: how often the partition changed.
        validation_losses: mean losses on data that is not trained on, one an evaluation.
        windows: first batch, batches and seconds of every timed window; none in older results.
        partitions: first batch of, and boundaries: every partition the run had; none in older results.
        orders: first batch of, and kind: every order the run had, ``"1F1B"`` or ``"planned"``; none in older results,
            which had no other than 1F1B.
        notes: further named values, such as what a scenario reports.
    """

    label: str
    tokens: int
    seconds: float
    losses: tuple[float, ...]
    boundaries: tuple[int, ...]
    bubble_ratio: float | None = None
    imbalance: float | None = None
    profiling_s: float = 0.0
    planning_s: float = 0.0
    migrating_s: float = 0.0
    last_tokens_per_s: float | None = None
    num_rebalances: int = 0
    validation_losses: tuple[float, ...] = ()
    windows: tuple[tuple[int, int, float], ...] = ()
    partitions: tuple[tuple[int, tuple[int, ...]], ...] = ()
    orders: tuple[tuple[int, str], ...] = ()
    notes: Mapping[str, float | int | str] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Throughput over the timed batches."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def final_loss(self) -> float:
        """Loss of the last batch; NaN when there was none."""
        return self.losses[-1] if self.losses else float("nan")

    def share(self, seconds: float) -> float:
        """Return a part of the run's time as a fraction of it."""
        return seconds / self.seconds if self.seconds > 0 else 0.0


def same_partition(static: RunSummary, dynamic: RunSummary, *, at_end: bool = False) -> bool:
    """Say whether no timed batch had another partition or order, so that two runs differ by noise (and own overhead).

    Args:
        static: the run that kept its first partition.
        dynamic: the same job, re-partitioned while it ran.
        at_end: look at the last timed windows alone.
    """
    if not dynamic.partitions and dynamic.num_rebalances and not at_end:
        return False  # older results do not say which partitions there were in between
    windows = dynamic.windows[-LAST_WINDOWS:] if at_end else dynamic.windows
    first = windows[0][0] if windows else 0
    end = max(len(dynamic.losses), first + 1)
    partitions = _had(dynamic.partitions or ((0, dynamic.boundaries),), first, end)
    orders = [_had(run.orders or ((0, "1F1B"),), first, end) for run in (static, dynamic)]
    return partitions == {static.boundaries} and orders[0] == orders[1]


def _had(phases: Sequence[tuple[int, T]], first: int, end: int) -> set[T]:
    """What a run had from a batch on, of what it had in turn."""
    ends = [*(start for start, _ in phases[1:]), end]
    return {what for (start, what), until in zip(phases, ends, strict=True) if max(start, first) < until}


def speedup(static: RunSummary, dynamic: RunSummary, *, at_end: bool = False) -> Estimate | None:
    """Throughput of the dynamic run over that of the static one, with the interval that their windows tell.

    Args:
        static: the run that kept its first partition.
        dynamic: the same job, re-partitioned while it ran.
        at_end: in the last timed windows alone.

    Returns:
        ``None`` where nothing was timed, or where both had the same partition.
    """
    rates = [run.last_tokens_per_s if at_end else run.tokens_per_s for run in (static, dynamic)]
    if not all(rates) or same_partition(static, dynamic, at_end=at_end):
        return None
    count = LAST_WINDOWS if at_end else len(static.windows)
    static_s = {(first, batches): seconds for first, batches, seconds in static.windows[-count:]}
    pairs = [(static_s[a, n], own_s) for a, n, own_s in dynamic.windows if (a, n) in static_s]
    return ratio_of_totals(*zip(*pairs, strict=True)) if pairs else Estimate(rates[1] / rates[0])


def speedup_text(static: RunSummary, dynamic: RunSummary, *, at_end: bool = False) -> str:
    """The speedup with its interval, or what is told in its place.

    Args:
        static: the run that kept its first partition.
        dynamic: the same job, re-partitioned while it ran.
        at_end: in the last timed windows alone.
    """
    found = speedup(static, dynamic, at_end=at_end)
    if found is not None:
        return found.text()
    rates = [run.last_tokens_per_s if at_end else run.tokens_per_s for run in (static, dynamic)]
    return SAME_PARTITION if all(rates) else UNKNOWN


def perplexity(loss: float) -> float:
    """Return ``exp(loss)`` of a loss in nats; infinite where a float can't hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def same_bits(left: Sequence[float], right: Sequence[float]) -> bool:
    """Say whether two sequences are equal bit for bit (NaN equals itself, -0.0 not 0.0)."""
    if len(left) != len(right):
        return False
    form = f"<{len(left)}d"
    return struct.pack(form, *left) == struct.pack(form, *right)


def first_difference(left: Sequence[float], right: Sequence[float]) -> int | None:
    """Return the index from which two sequences of losses differ, or ``None``."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if not same_bits([a], [b]):
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def comparison_table(static: RunSummary, dynamic: RunSummary) -> str:
    """Set a run with a static partition and one with a dynamic partition side by side.

    Args:
        static: the run that kept its first partition.
        dynamic: the same job, re-partitioned while it ran.

    Returns:
        A table of throughput, speedup with its 95% interval, bubble ratio, overheads, final loss and equality of bits.
    """
    return format_table(comparison_rows(static, dynamic))


def comparison_rows(static: RunSummary, dynamic: RunSummary) -> list[list[str]]:
    """Return the cells of :func:`comparison_table`; the first row is the head.

    Args:
        static: the run that kept its first partition.
        dynamic: the same job, re-partitioned while it ran.
    """
    runs = (static, dynamic)
    last = len(dynamic.windows[-LAST_WINDOWS:])
    known = any(run.imbalance is not None for run in runs)
    rows = [
        ["", *(run.label for run in runs)],
        ["throughput (tokens/s)", *(_rate(run.tokens_per_s or None) for run in runs)],
        ["speedup (95% interval)", "", speedup_text(static, dynamic)],
        [f"  in the last {f'{last} windows' if last > 1 else 'window'}", *(_rate(r.last_tokens_per_s) for r in runs)],
        ["  speedup there", "", speedup_text(static, dynamic, at_end=True)],
        ["bubble ratio (idle share)", *(_percent(run.bubble_ratio) for run in runs)],
        *([["imbalance of stages' loads", *(_percent(run.imbalance) for run in runs)]] if known else []),
        ["time spent profiling", *(_percent(run.share(run.profiling_s), 2) for run in runs)],
        ["time spent planning", *(_percent(run.share(run.planning_s), 2) for run in runs)],
        ["time spent migrating", *(_percent(run.share(run.migrating_s), 2) for run in runs)],
        ["re-partitions", *(str(run.num_rebalances) for run in runs)],
        ["stage boundaries at the end", *(spaced(run.boundaries) for run in runs)],
        *([["order at the end", *(run.orders[-1][1] for run in runs)]] if all(run.orders for run in runs) else []),
        ["first loss", *(_loss(run.losses[0]) if run.losses else UNKNOWN for run in runs)],
        ["final loss", *(_loss(run.final_loss) for run in runs)],
        ["losses of all batches", "", _equality(static.losses, dynamic.losses)],
    ]
    if any(run.validation_losses for run in runs):
        last = [run.validation_losses[-1] if run.validation_losses else None for run in runs]
        rows += [
            ["validation loss", *(UNKNOWN if loss is None else _loss(loss) for loss in last)],
            ["validation perplexity", *(UNKNOWN if loss is None else f"{perplexity(loss):,.2f}" for loss in last)],
            ["validation losses", "", _equality(static.validation_losses, dynamic.validation_losses, "evaluation")],
        ]
    names = list(dict.fromkeys([*static.notes, *dynamic.notes]))
    return rows + [[name, *(str(run.notes.get(name, UNKNOWN)) for run in runs)] for name in names]


def _percent(fraction: float | None, digits: int = 1) -> str:
    return UNKNOWN if fraction is None else f"{100 * fraction:.{digits}f} %"


def _rate(tokens_per_s: float | None) -> str:
    return UNKNOWN if tokens_per_s is None else f"{tokens_per_s:,.0f}"


def spaced(boundaries: Sequence[int]) -> str:
    """Show boundaries as everywhere: ``[0 5 9 14]``."""
    return "[" + " ".join(map(str, boundaries)) + "]"


def share(value: float | None, noise: float | None = None) -> str:
    """Show a share, with its standard error where that is known: ``25.0% ± 0.4%``."""
    if value is None:
        return UNKNOWN
    return f"{value:.1%}" if noise is None else f"{value:.1%} ± {noise:.1%}"


def _loss(loss: float) -> str:
    return f"{loss:.6f}"


def _equality(left: Sequence[float], right: Sequence[float], what: str = "batch") -> str:
    index = first_difference(left, right)
    return f"equal bits ({len(left)})" if index is None else f"DIFFER from {what} {index}"
