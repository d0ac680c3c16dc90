"""Pictures in the output folder: stage times of both runs, and the workers of a re-packed one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every common form of colour blindness. Hatches and line
# styles tell the runs apart without colour.
STATIC_COLOUR = "#D55E00"
DYNAMIC_COLOUR = "#0072B2"
MARK_COLOUR = "#555555"


def save_comparison(
    path: str | Path,
    *,
    static_stages_s: Sequence[float],
    dynamic_stages_s: Sequence[float],
    static_batches_s: Sequence[float] = (),
    dynamic_batches_s: Sequence[float] = (),
    rebalanced_at: Sequence[int] = (),
    title: str = "",
) -> Path:
    """Draw what each stage computes in a batch, and how long batches took, for two partitions.

    Args:
        path: file to write; its ending chooses the format (``.png``, ``.svg``, ``.pdf``). Missing
            folders are made.
        static_stages_s: busy seconds a batch of each stage, under the static partition.
        dynamic_stages_s: same, under the dynamic partition.
        static_batches_s: seconds of every batch of the static run; none: no second panel.
        dynamic_batches_s: seconds of every batch of the dynamic run.
        rebalanced_at: batches after which the dynamic run was re-partitioned.
        title: stands above the picture.

    Returns:
        The path written.

    Raises:
        ValueError: if the two partitions have different numbers of stages.
    """
    if len(static_stages_s) != len(dynamic_stages_s):
        raise ValueError(
            f"static_stages_s has {len(static_stages_s)} stages, dynamic_stages_s "
            f"{len(dynamic_stages_s)}: both must describe the same pipeline"
        )
    two_panels = bool(static_batches_s) or bool(dynamic_batches_s)
    figure = Figure(figsize=(10 if two_panels else 5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 2 if two_panels else 1, squeeze=False)[0]
    _draw_stages(axes[0], static_stages_s, dynamic_stages_s)
    if two_panels:
        _draw_batches(axes[1], static_batches_s, dynamic_batches_s, rebalanced_at)
    if title:
        figure.suptitle(title)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    return target


def _draw_stages(axes: Any, static_s: Sequence[float], dynamic_s: Sequence[float]) -> None:
    """Draw a pair of bars a stage, and each partition's bottleneck as a line."""
    width = 0.38
    runs = (
        (static_s, -width / 2, STATIC_COLOUR, "//", "static partition", "--"),
        (dynamic_s, width / 2, DYNAMIC_COLOUR, "", "dynamic partition", ":"),
    )
    for seconds, shift, colour, hatch, label, line in runs:
        places = [stage + shift for stage in range(len(seconds))]
        axes.bar(places, seconds, width, color=colour, hatch=hatch, edgecolor="white", label=label)
        axes.axhline(max(seconds, default=0.0), color=colour, linestyle=line, linewidth=1)
    axes.set_xticks(range(len(static_s)))
    axes.set_xlabel("stage")
    axes.set_ylabel("computing time a batch (s)")
    axes.set_ylim(0, 1.3 * max([*static_s, *dynamic_s, 1e-9]))
    axes.set_title("Stages at the end of the run")
    axes.legend(frameon=False, loc="upper center", ncols=2)


def _draw_batches(
    axes: Any,
    static_s: Sequence[float],
    dynamic_s: Sequence[float],
    rebalanced_at: Sequence[int],
) -> None:
    """Draw the time of every batch, with a mark where the partition changed."""
    for order, batch in enumerate(rebalanced_at):
        label = "re-partition" if order == 0 else None
        axes.axvline(batch + 0.5, color=MARK_COLOUR, linestyle=":", linewidth=1, label=label)
    axes.plot(range(len(static_s)), static_s, "--", color=STATIC_COLOUR, label="static partition")
    axes.plot(
        range(len(dynamic_s)), dynamic_s, "-", color=DYNAMIC_COLOUR, label="dynamic partition"
    )
    axes.set_xlabel("batch")
    axes.set_ylabel("time of a batch (s)")
    # A single slow batch (the first, say) must not flatten the rest.
    ordered = sorted([*static_s, *dynamic_s])
    axes.set_ylim(0, 1.4 * ordered[int(0.98 * (len(ordered) - 1))])
    axes.set_title("How long a batch takes")
    axes.legend(frameon=False, loc="upper right")


def save_workers(
    path: str | Path,
    *,
    workers: Sequence[int],
    batches_s: Sequence[float],
    all_batches_s: Sequence[float],
    tokens: int,
    title: str = "",
) -> Path:
    """Draw how many workers trained each batch of a re-packed run, and what each of them achieved.

    Args:
        path: file to write; its ending chooses the format. Missing folders are made.
        workers: ranks that trained each batch of the re-packed run.
        batches_s: seconds of its batches.
        all_batches_s: seconds of the same batches on as many ranks as it began with.
        tokens: tokens of a batch.
        title: stands above the picture.

    Returns:
        The path written.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    batches = range(len(workers))
    left.step(batches, workers, where="mid", color=DYNAMIC_COLOUR, label="re-packed")
    left.axhline(workers[0], color=STATIC_COLOUR, linestyle="--", label="all workers")
    left.set(xlabel="batch", ylabel="workers", ylim=(0, 1.25 * workers[0]), title="Workers")
    own = [tokens / seconds / count for seconds, count in zip(batches_s, workers, strict=True)]
    right.plot(batches, own, "-", color=DYNAMIC_COLOUR, label="re-packed")
    right.plot(
        range(len(all_batches_s)), [tokens / seconds / workers[0] for seconds in all_batches_s], "--",
        color=STATIC_COLOUR, label="all workers",
    )
    right.set(xlabel="batch", ylabel="tokens/s and worker", title="Throughput of a worker")
    right.set_ylim(0, 1.25 * max([*own, 1e-9]))
    left.set_yticks(range(workers[0] + 1))
    left.legend(frameon=False, loc="lower left")
    right.legend(frameon=False, loc="upper left")
    if title:
        figure.suptitle(title)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    return target
