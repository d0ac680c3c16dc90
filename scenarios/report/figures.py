"""The pictures of the report page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import Normal, Stroke

from scenarios.recording import Recording
from scenarios.report.pictures import DYNAMIC_COLOUR, MARK_COLOUR, STATIC_COLOUR
from scenarios.report.results import JobResults

START_COLOUR = "#999999"
_MOST_NAMES = 40  # layers beyond which only some are named
_QUANTILE = 0.98  # of the values, at least, fit into a scale: a single slow batch must not flatten the rest


def batches_figure(results: JobResults) -> Figure:
    """Throughput and loss of every batch, with a mark where the partition changed.

    Args:
        results: of both runs.
    """
    figure = _figure(10, 3.6)
    left, right = figure.subplots(1, 2)
    runs = (
        (results.static, STATIC_COLOUR, "--", "static partition"),
        (results.dynamic, DYNAMIC_COLOUR, "-", "dynamic partition"),
    )
    tokens = results.tokens_a_batch or 1
    for run, colour, line, label in runs:
        rates = [tokens / seconds for seconds in run.batches_s]
        left.plot(range(len(rates)), rates, line, color=colour, label=label, linewidth=1.4)
        right.plot(range(len(run.summary.losses)), run.summary.losses, line, color=colour, label=label, linewidth=1.4)
    for axes in (left, right):
        for order, batch in enumerate(results.dynamic.rebalanced_at):
            axes.axvline(
                batch + 0.5, color=MARK_COLOUR, linestyle=":", linewidth=1, label=None if order else "re-partition"
            )
        axes.set_xlabel("batch")
        _plain(axes)
    left.set_ylim(0, 1.45 * _scale([tokens / s for run in runs for s in run[0].batches_s]))
    left.set_ylabel("tokens/s" if results.tokens_a_batch else "batches/s")
    left.set_title("Throughput of every batch", fontsize=10)
    left.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)
    right.set_ylabel("loss")
    right.set_title("Loss of every batch", fontsize=10)
    return figure


def heat_map_figure(runs: Mapping[str, Recording]) -> Figure:
    """What every layer cost over training, dark for dear, with the stage boundaries drawn on it.

    Args:
        runs: layer times by the run's name; all of one model.
    """
    num_layers = max(len(recording.names) for recording in runs.values())
    height = min(6.0, 1.0 + 0.17 * num_layers)
    figure = _figure(10, 0.6 + height * len(runs))
    all_axes = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    rows = [recording.seconds(row) for recording in runs.values() for row in range(len(recording.forward_s))]
    values = [s * 1e3 for row in rows for s in row]
    norm = Normalize(0, _scale(values))
    mesh: Any = None
    for axes, (name, recording) in zip(all_axes, runs.items(), strict=True):
        mesh = _heat_map(axes, recording, norm)
        axes.set_title(name, fontsize=10, loc="left")
    all_axes[-1].set_xlabel("batch")
    above = max(values) > norm.vmax if norm.vmax is not None else False
    bar = figure.colorbar(mesh, ax=list(all_axes), extend="max" if above else "neither", pad=0.02)
    bar.set_label("ms a micro-batch, forward + backward")
    line = Line2D([], [], color="white", linewidth=1.8, path_effects=_outline(), label="stage boundary")
    figure.legend(handles=[line], loc="outside upper right", frameon=False, fontsize=9)
    return figure


def _heat_map(axes: Any, recording: Recording, norm: Normalize) -> Any:
    end = recording.first_batches[-1] + recording.batches_a_row
    edges = [batch - 0.5 for batch in (*recording.first_batches, end)]
    num_layers = len(recording.names)
    rows = [recording.seconds(row) for row in range(len(recording.first_batches))]
    table = [[row[layer] * 1e3 for row in rows] for layer in range(num_layers)]
    mesh = axes.pcolormesh(
        edges, [layer - 0.5 for layer in range(num_layers + 1)], table, cmap="cividis_r", norm=norm, rasterized=True
    )
    for xs, ys in _boundary_lines(recording, edges[0], edges[-1]):
        axes.plot(xs, ys, color="white", linewidth=1.8, path_effects=_outline(), solid_joinstyle="miter")
    axes.set_ylim(num_layers - 0.5, -0.5)
    axes.set_xlim(edges[0], edges[-1])
    step = math.ceil(num_layers / _MOST_NAMES)
    named = range(0, num_layers, step)
    axes.set_yticks(list(named), [f"{recording.names[layer]}  {layer}" for layer in named], fontsize=7)
    axes.set_ylabel("layer")
    return mesh


def _boundary_lines(recording: Recording, start: float, end: float) -> Iterator[tuple[list[float], list[float]]]:
    """Each boundary as one line with steps; new lines begin where the number of stages changes."""
    starts = [max(batch - 0.5, start) for batch, _ in recording.partitions]
    pieces = zip(starts, [*starts[1:], end], (parts for _, parts in recording.partitions), strict=True)
    for _, group in groupby(pieces, key=lambda piece: len(piece[2])):
        steps = list(group)
        xs = [x for low, high, _ in steps for x in (low, high)]
        for boundary in range(1, len(steps[0][2]) - 1):
            yield xs, [parts[boundary] - 0.5 for _, _, parts in steps for _ in range(2)]


def stages_figure(bars: Mapping[str, Sequence[float]]) -> Figure:
    """Busy seconds of every stage, a group of bars a stage, and each bar's largest as a line.

    Args:
        bars: up to three lists of S seconds by name.
    """
    styles = ((START_COLOUR, ".."), (STATIC_COLOUR, "//"), (DYNAMIC_COLOUR, ""))[-len(bars) :]
    figure = _figure(10, 3.4)
    axes = figure.subplots()
    width = 0.8 / len(bars)
    for order, ((name, busy_s), (colour, hatch)) in enumerate(zip(bars.items(), styles, strict=True)):
        places = [stage + (order - (len(bars) - 1) / 2) * width for stage in range(len(busy_s))]
        label = f"{name} (slowest {max(busy_s):.3g} s)"
        axes.bar(places, busy_s, width, color=colour, hatch=hatch, edgecolor="white", label=label)
        axes.axhline(max(busy_s), color=colour, linestyle=":", linewidth=1)
    axes.set_xticks(range(max(map(len, bars.values()))))
    axes.set_xlabel("stage")
    axes.set_ylabel("computing time a batch (s)")
    axes.set_ylim(0, 1.3 * max(1e-9, *(max(busy_s) for busy_s in bars.values())))
    axes.legend(frameon=False, fontsize=8, loc="upper center", ncols=len(bars))
    _plain(axes)
    return figure


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _outline() -> list[Any]:
    """A dark rim, so that a white line shows on light colours, too."""
    return [Stroke(linewidth=3.4, foreground="black"), Normal()]


def _scale(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return max(1e-9, ordered[math.ceil(_QUANTILE * (len(ordered) - 1))]) if ordered else 1.0
