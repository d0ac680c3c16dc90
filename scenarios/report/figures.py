"""The pictures of the report page, in the page's own colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynpipe_ds.reporting import SERIES, dress, new_figure
from scenarios.report.results import JobResults

STATIC, DYNAMIC, START = SERIES[1], SERIES[0], SERIES[3]
_MARK = SERIES[2]
_QUANTILE = 0.98  # of the values fit into a scale: a single slow batch must not flatten the rest


def throughput_figure(results: JobResults) -> Any:
    """Throughput of every batch of both runs, with a mark where the partition changed.

    Args:
        results: of both runs.
    """
    tokens = results.tokens_a_batch or 1
    rates = [[tokens / seconds for seconds in run.batches_s] for run in (results.static, results.dynamic)]
    axes = _two_lines(rates, results.dynamic.rebalanced_at, "tokens/s" if results.tokens_a_batch else "batches/s")
    axes.set_ylim(0, 1.4 * _scale([rate for of in rates for rate in of]))
    return axes.figure


def losses_figure(results: JobResults) -> Any:
    """Loss of every batch of both runs.

    Args:
        results: of both runs.
    """
    losses = [run.summary.losses for run in (results.static, results.dynamic)]
    return _two_lines(losses, results.dynamic.rebalanced_at, "loss").figure


def _two_lines(values: Sequence[Sequence[float]], rebalanced_at: Sequence[int], unit: str) -> Any:
    axes = new_figure(5.0, 3.0).subplots()
    looks = zip(values, ((STATIC, "--", "static"), (DYNAMIC, "-", "dynamic")), strict=True)
    for line, (colour, dash, label) in looks:
        axes.plot(range(len(line)), line, dash, color=colour, label=label, linewidth=1.6)
    for order, batch in enumerate(rebalanced_at):
        label = None if order else "re-partition"
        axes.axvline(batch + 0.5, color=_MARK, linestyle=":", linewidth=1.2, label=label)
    dress(axes, x="batch", y=unit)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=axes.xaxis.label.get_color(), loc="upper center", ncols=3)
    return axes


def stages_figure(bars: Mapping[str, Sequence[float]]) -> Any:
    """Busy seconds of every stage, a group of bars a stage, and each bar's largest as a line.

    Args:
        bars: up to three lists of S seconds by name.
    """
    styles = ((START, ".."), (STATIC, "//"), (DYNAMIC, ""))[-len(bars) :]
    axes = new_figure(10, 3.4).subplots()
    width = 0.8 / len(bars)
    for order, ((name, busy_s), (colour, hatch)) in enumerate(zip(bars.items(), styles, strict=True)):
        places = [stage + (order - (len(bars) - 1) / 2) * width for stage in range(len(busy_s))]
        label = f"{name} (slowest {max(busy_s):.3g} s)"
        axes.bar(places, busy_s, width, color=colour, hatch=hatch, edgecolor="white", label=label)
        axes.axhline(max(busy_s), color=colour, linestyle=":", linewidth=1)
    dress(axes, x="stage", y="computing time a batch (s)")
    axes.set_xticks(range(max(map(len, bars.values()))))
    axes.set_ylim(0, 1.3 * max(1e-9, *(max(busy_s) for busy_s in bars.values())))
    axes.legend(
        frameon=False, fontsize=8.5, labelcolor=axes.xaxis.label.get_color(), loc="upper center", ncols=len(bars)
    )
    return axes.figure


def _scale(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return max(1e-9, ordered[int(_QUANTILE * (len(ordered) - 1))]) if ordered else 1.0
