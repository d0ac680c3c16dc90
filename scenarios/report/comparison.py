"""Two runs of one job side by side, as a table: figures, overheads, and whether their losses have equal bits."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dynpipe_ds.reporting import format_table

UNKNOWN = "n/a"


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
        profiling_s: time spent on profiling, on the rank where it was most.
        planning_s: same, for planning.
        migrating_s: same, for moving layers.
        last_tokens_per_s: throughput of the last timed window alone; ``None`` if unknown.
        num_rebalances: how often the partition changed.
        validation_losses: mean losses on data that is not trained on, one an evaluation.
        notes: further named values, such as what a scenario reports.
    """

    label: str
    tokens: int
    seconds: float
    losses: tuple[float, ...]
    boundaries: tuple[int, ...]
    bubble_ratio: float | None = None
    profiling_s: float = 0.0
    planning_s: float = 0.0
    migrating_s: float = 0.0
    last_tokens_per_s: float | None = None
    num_rebalances: int = 0
    validation_losses: tuple[float, ...] = ()
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
        A table of throughput, speedup, bubble ratio, overheads, final loss and equality of bits.
    """
    return format_table(comparison_rows(static, dynamic))


def comparison_rows(static: RunSummary, dynamic: RunSummary) -> list[list[str]]:
    """Return the cells of :func:`comparison_table`; the first row is the head.

    Args:
        static: the run that kept its first partition.
        dynamic: the same job, re-partitioned while it ran.
    """
    runs = (static, dynamic)
    rows = [
        ["", *(run.label for run in runs)],
        ["throughput (tokens/s)", *(_rate(run.tokens_per_s or None) for run in runs)],
        ["speedup", "", _ratio(dynamic.tokens_per_s, static.tokens_per_s)],
        ["  in the last window", *(_rate(run.last_tokens_per_s) for run in runs)],
        ["  speedup there", "", _ratio(dynamic.last_tokens_per_s, static.last_tokens_per_s)],
        ["bubble ratio (idle share)", *(_percent(run.bubble_ratio) for run in runs)],
        ["time spent profiling", *(_percent(run.share(run.profiling_s), 2) for run in runs)],
        ["time spent planning", *(_percent(run.share(run.planning_s), 2) for run in runs)],
        ["time spent migrating", *(_percent(run.share(run.migrating_s), 2) for run in runs)],
        ["re-partitions", *(str(run.num_rebalances) for run in runs)],
        ["stage boundaries at the end", *(spaced(run.boundaries) for run in runs)],
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


def _ratio(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}x" if value is not None and base else UNKNOWN


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
