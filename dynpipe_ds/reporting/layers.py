"""What layers cost over training, and where the boundaries were: a value, and its picture."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dynpipe_ds.journal.read import Journal
from dynpipe_ds.reporting.themed import MUTED, dress, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_ROWS = 512
"""Of one picture; neighbours of a longer run are averaged."""

_MOST_NAMES = 40  # layers beyond which only some are named
QUANTILE = 0.98
"""Of the values, at least, fit into a scale: a single slow batch must not flatten the rest."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of every layer over training.

    Attributes:
        names: of the L layers.
        batches: where each row begins; a row stands until the next one begins.
        end: one more than the last batch.
        rows: forward and backward seconds of a micro-batch, L numbers each.
        partitions: first batch of, and boundaries: every partition.
    """

    names: tuple[str, ...]
    batches: tuple[int, ...]
    end: int
    rows: tuple[tuple[float, ...], ...]
    partitions: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def of(cls, journal: Journal) -> LayerTimes:
        """Take them from a journal; neighbours are averaged where there are too many for a picture.

        Args:
            journal: of the run, with one profile at least.

        Returns:
            The value.
        """
        profiles = journal.profiles
        size = math.ceil(len(profiles) / MOST_ROWS)
        groups = [profiles[i : i + size] for i in range(0, len(profiles), size)]
        rows = (zip(*(profile.layer_s for profile in group), strict=True) for group in groups)
        return cls(
            tuple(journal.about["layers"]), tuple(group[0].batch for group in groups), profiles[-1].batch + 1,
            tuple(tuple(sum(layer) / len(layer) for layer in row) for row in rows), tuple(journal.partitions),
        )


def layers_figure(runs: Mapping[str, LayerTimes]) -> Figure:
    """What every layer cost over training, darker for slower, with the stage boundaries drawn on it.

    Args:
        runs: layer times by the run's name; all of one model.

    Returns:
        The picture.
    """
    from matplotlib.colors import Normalize

    num_layers = max(len(times.names) for times in runs.values())
    figure = new_figure(10, 0.5 + (0.7 + min(6.0, 0.2 * num_layers)) * len(runs))
    all_axes = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
    values = [s * 1e3 for times in runs.values() for row in times.rows for s in row]
    norm = Normalize(0, scale(values))
    mesh: Any = None
    for axes, (name, times) in zip(all_axes, runs.items(), strict=True):
        mesh = _heat_map(axes, times, norm)
        dress(axes, x="", y=name)
        axes.grid(visible=False)
        axes.tick_params(axis="y", labelsize=8)
    all_axes[-1].set_xlabel("batch", color=MUTED, fontsize=9)
    above = norm.vmax is not None and max(values) > norm.vmax
    bar = figure.colorbar(mesh, ax=list(all_axes), extend="max" if above else "neither", pad=0.02)
    bar.set_label("ms a micro-batch, forward + backward", color=MUTED, fontsize=9)
    bar.ax.tick_params(colors=MUTED, labelsize=8)
    bar.outline.set_visible(False)
    return figure


def _heat_map(axes: Any, times: LayerTimes, norm: Any) -> Any:
    from matplotlib.patheffects import Normal, Stroke

    edges = [batch - 0.5 for batch in (*times.batches, times.end)]
    num_layers = len(times.names)
    table = [[row[layer] * 1e3 for row in times.rows] for layer in range(num_layers)]
    mesh = axes.pcolormesh(
        edges, [layer - 0.5 for layer in range(num_layers + 1)], table, cmap="cividis_r", norm=norm, rasterized=True
    )
    # A dark rim, so that a light line shows on light colours, too.
    rim = [Stroke(linewidth=3.6, foreground="#0a0a0a"), Normal()]
    for xs, ys in _boundary_lines(times, edges[0], edges[-1]):
        axes.plot(xs, ys, color="white", linewidth=1.8, path_effects=rim, solid_joinstyle="miter")
    axes.set(xlim=(edges[0], edges[-1]), ylim=(num_layers - 0.5, -0.5))
    named = range(0, num_layers, math.ceil(num_layers / _MOST_NAMES))
    axes.set_yticks(list(named), [f"{times.names[layer]}  {layer}" for layer in named])
    return mesh


def _boundary_lines(times: LayerTimes, start: float, end: float) -> Iterator[tuple[list[float], list[float]]]:
    """Each boundary as one line with steps; new lines begin where the number of stages changes."""
    starts = [max(batch - 0.5, start) for batch, _ in times.partitions]
    pieces = zip(starts, [*starts[1:], end], (parts for _, parts in times.partitions), strict=True)
    for _, group in groupby(pieces, key=lambda piece: len(piece[2])):
        steps = list(group)
        xs = [x for low, high, _ in steps for x in (low, high)]
        for boundary in range(1, len(steps[0][2]) - 1):
            yield xs, [parts[boundary] - 0.5 for _, _, parts in steps for _ in range(2)]


def scale(values: Sequence[float]) -> float:
    """Where a scale from 0 ends, so that odd values do not flatten the rest.

    Args:
        values: to be drawn.
    """
    ordered = sorted(values)
    return max(1e-9, ordered[math.ceil(QUANTILE * (len(ordered) - 1))]) if ordered else 1.0


