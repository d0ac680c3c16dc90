"""Pictures of the tables; Okabe and Ito's colours, hatches and markers tell things apart without colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.record import COLOUR_MAP

STYLES: dict[str, tuple[str, str]] = {
    "static uniform": ("#999999", ""),
    "static parameters": ("#D9D9D9", "//"),
    "partition:parameters": ("#F0E442", "//"),
    "partition:time": ("#F0E442", ""),
    "balanced:parameters": ("#E69F00", "//"),
    "balanced:time": ("#E69F00", ""),
    "contiguous diffusion:parameters": ("#CC79A7", "//"),
    "contiguous diffusion:time": ("#CC79A7", ""),
    "optimal:time": ("#0072B2", ""),
    "optimal:time, auto": ("#56B4E9", ".."),
    "simulated:time, auto": ("#009E73", "xx"),
}
OTHERS = (("#D55E00", ""), ("#D55E00", "//"), ("#000000", ".."))


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)


def _style(label: str, order: int) -> tuple[str, str]:
    return STYLES.get(label, OTHERS[order % len(OTHERS)])


def plot_bars(
    path: Path, panels: Mapping[str, Mapping[str, Mapping[str, float]]], *, ylabel: str, title: str,
    reference: float | None = None, xlabel: str = "", columns: int = 1,
) -> None:
    """Draw grouped bars, one panel above the other.

    Args:
        path: PNG to write.
        panels: title -> group -> label -> value.
        ylabel: quantity with unit.
        title: above the picture.
        reference: height of a dashed line.
        xlabel: what the groups are.
        columns: panels side by side.
    """
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(7.5, 6 * columns), 1.3 + 2.5 * rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    labels = list(dict.fromkeys(label for groups in panels.values() for bars in groups.values() for label in bars))
    width = 0.84 / max(1, len(labels))
    for axes, (name, groups) in zip(all_axes, panels.items(), strict=False):
        for order, label in enumerate(labels):
            colour, hatch = _style(label, order)
            heights = [bars.get(label, float("nan")) for bars in groups.values()]
            places = np.arange(len(groups)) + (order - (len(labels) - 1) / 2) * width
            axes.bar(places, heights, width, color=colour, hatch=hatch, edgecolor="white", linewidth=0.3, label=label)
        if reference is not None:
            axes.axhline(reference, color="black", linestyle="--", linewidth=0.8)
        axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
        axes.set_ylabel(ylabel, fontsize=8)
        axes.set_title(name, fontsize=9, loc="left")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    if xlabel:
        all_axes[len(panels) - 1].set_xlabel(xlabel)
    handles, names = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def plot_predictions(path: Path, comparisons: Sequence[Any], goal: float) -> None:
    """Draw virtual over sleeping seconds with the goal as a band.

    Args:
        path: PNG to write.
        comparisons: ``benchmarks.replay.validate.Comparison`` values.
        goal: relative error.
    """
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes: Any = figure.subplots()
    places = np.arange(len(comparisons))
    axes.axhspan(-100 * goal, 100 * goal, color="#E8E8E8", label=f"goal: within {goal:.0%}")
    axes.axhline(0, color="black", linewidth=0.8)
    for method, marker, colour in (("static uniform", "s", "#E69F00"), ("optimal:time", "o", "#0072B2")):
        shown = np.array([c.case.method == method for c in comparisons])
        errors = 100 * np.array([c.error for c in comparisons])
        axes.plot(places[shown], errors[shown], marker, color=colour, label=method)
    names = [f"{c.case.trace.split(':')[1]}\n{c.case.num_stages} stages" for c in comparisons]
    axes.set_xticks(places, names, rotation=60, fontsize=7, ha="right")
    axes.set_ylabel("virtual / sleeping seconds - 1 (%)")
    axes.legend(frameon=False, fontsize=8, ncols=4)
    axes.set_title("Replay in virtual time against sleeping replay", fontsize=10)
    _save(figure, path)


def plot_heat_map(
    path: Path, layers_ms: np.ndarray, boundaries: Sequence[Sequence[int]], *, title: str
) -> None:
    """Draw what every layer takes in every batch, with the stage boundaries on it.

    Args:
        path: PNG to write.
        layers_ms: ``(batches, L)`` milliseconds of a micro-batch.
        boundaries: of every batch, S + 1 layer indices.
        title: above the picture.
    """
    figure = Figure(figsize=(9, 4.6), layout="constrained")
    axes: Any = figure.subplots()
    num_batches, num_layers = layers_ms.shape
    image = axes.imshow(
        layers_ms.T, aspect="auto", origin="lower", cmap=COLOUR_MAP, interpolation="nearest",
        extent=(-0.5, num_batches - 0.5, -0.5, num_layers - 0.5),
    )
    edges = np.repeat(np.arange(num_batches + 1) - 0.5, 2)[1:-1]
    for cut in range(1, len(boundaries[0]) - 1):
        heights = np.repeat([parts[cut] - 0.5 for parts in boundaries], 2)
        axes.plot(edges, heights, color="white", linewidth=2.4)
        axes.plot(edges, heights, color="#D55E00", linewidth=1.2, label="stage boundary" if cut == 1 else None)
    figure.colorbar(image, ax=axes, label="forward + backward of a micro-batch (ms)")
    axes.set_xlabel("batch")
    axes.set_ylabel("layer")
    axes.legend(loc="upper left", fontsize=8)
    axes.set_title(title, fontsize=10)
    _save(figure, path)
