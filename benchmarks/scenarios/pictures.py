"""Pictures of the scenarios: throughput, layer cost over training with the boundaries, a batch before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from benchmarks.record import COLOUR_MAP, new_figure, save_figure
from benchmarks.scenarios.contenders import OURS, PARAMETERS, UNIFORM
from benchmarks.scenarios.summary import summarise
from dynpipe_ds import LayerProfile, PipelineProfile
from dynpipe_ds.reporting import around_move, save_chrome_trace, save_gantt
from dynpipe_ds.simulation import Interval, Workload, simulate

_BARS = ((UNIFORM, "#E69F00", "\\\\"), (PARAMETERS, "#D55E00", "//"), (OURS, "#0072B2", ""))
_OUTLINE = withStroke(linewidth=5, foreground="black")
_LATE = 5  # batches at the end that a picture of one batch is the mean of


def save_rates(scenarios: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Draw the throughput of every run over the ideal's, with the spread of the windows, scenario by scenario.

    Args:
        scenarios: values by scenario.
        path: file to write.
    """
    figure = new_figure(11, 4.2)
    axes = figure.subplots()
    width, summaries = 0.25, {name: summarise(values) for name, values in scenarios.items()}
    for number, (run, colour, hatch) in enumerate(_BARS):
        for place, summary in enumerate(summaries.values()):
            same = run == PARAMETERS and run not in summary.tokens_per_s
            spread = summary.tokens_per_s[UNIFORM if same else run]
            median, least, greatest = (
                100 * v / summary.ideal_tokens_per_s for v in (spread.median, spread.least, spread.greatest)
            )
            axes.bar(
                place + (number - 1) * width, median, width, color=colour, hatch=hatch, edgecolor="white",
                yerr=[[median - least], [greatest - median]], capsize=2, label=run if place == 0 else None,
            )
    axes.axhline(100, color="black", linewidth=1, label="ideal: best partition, no overhead")
    axes.axhline(95, color="black", linewidth=1, linestyle=":", label="goal: 95% of it")
    axes.set_xticks(range(len(summaries)), [name.replace("_", " ") for name in summaries])
    axes.set(ylabel="throughput (% of the ideal)", ylim=(0, None), title="At the end of training, after all changes")
    figure.legend(frameon=False, ncols=6, fontsize=8, loc="outside lower center")
    return save_figure(figure, path)


def save_heat_map(name: str, values: Mapping[str, Any], path: Path) -> Path:
    """Draw what each layer cost in every batch, and where the stages ended.

    Args:
        name: of the scenario.
        values: its values.
        path: file to write.
    """
    ours = values["runs"][OURS]
    cost_ms = 1e3 * np.array(ours["layers_s"]).sum(axis=2).T
    figure = new_figure(9, 4.5)
    axes = figure.subplots()
    top = float(np.quantile(cost_ms, 0.99))  # one slow batch must not fade all others
    image = axes.imshow(cost_ms, aspect="auto", origin="lower", cmap=COLOUR_MAP, vmin=0, vmax=top)
    figure.colorbar(image, label="forward and backward of a micro-batch (ms)")
    _draw_cuts(axes, ours["boundaries"], "-", "white", "ours")
    _draw_cuts(axes, values["runs"][UNIFORM]["boundaries"], "--", "#E69F00", "static uniform")
    axes.set(xlabel="batch", ylabel="layer", title=f"{name.replace('_', ' ')}: cost of every layer while training")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    figure.legend(ncols=2, fontsize=8, loc="outside lower center", frameon=False)
    return save_figure(figure, path)


def _draw_cuts(axes: Any, boundaries: list[list[int]], line: str, colour: str, label: str) -> None:
    """Draw the inner boundaries over the batches, outlined so that they show on light and dark cells."""
    places = np.arange(len(boundaries) + 1) - 0.5
    for cut in range(1, len(boundaries[0]) - 1):
        heights = [b[cut] - 0.5 for b in boundaries]
        steps = [*heights, heights[-1]]
        axes.step(
            places, steps, where="post", color=colour, linestyle=line, linewidth=2.5, path_effects=[_OUTLINE],
            label=f"stage boundary, {label}" if cut == 1 else None,
        )


def save_timeline(name: str, values: Mapping[str, Any], path: Path) -> Path:
    """Draw a batch of the changed model with the static partition and with ours, from the measured layer times.

    Where ours has moved, a third panel shows its last move: the batch before, the move, the batch after; that one
    also goes into a trace for Perfetto, beside the picture.

    Args:
        name: of the scenario.
        values: its values.
        path: file to write.
    """
    ours, uniform = values["runs"][OURS], values["runs"][UNIFORM]
    late_s = np.mean(ours["layers_s"][-_LATE:], axis=0).tolist()
    last = ours["boundaries"][-1]
    panels: dict[str, Sequence[Interval]] = {
        f"static uniform {uniform['boundaries'][-1]}": _timeline(ours, late_s, uniform["boundaries"][-1]),
        f"ours {last}": _timeline(ours, late_s, last),
    }
    moves = [batch for batch, (old, new) in enumerate(pairwise(ours["boundaries"]), start=1) if old != new]
    if moves:
        at = moves[-1]
        old, new = ours["boundaries"][at - 1], ours["boundaries"][at]
        before, after = (_timeline(ours, ours["layers_s"][i], ours["boundaries"][i]) for i in (at - 1, at))
        panels[f"ours moving {old} to {new} after batch {at}"] = moving = around_move(
            before, ours["migrating_s"] / len(moves), after
        )
        save_chrome_trace(path.with_suffix(".json"), moving, name=f"{name}: the batches before and after a move")
    return save_gantt(path, panels, title=f"{name.replace('_', ' ')}: batches, simulated from the measured layers")


def _timeline(
    run: Mapping[str, Any], layers_s: Sequence[Sequence[float]], boundaries: Sequence[int]
) -> Sequence[Interval]:
    """A batch of a run on some partition."""
    layers = tuple(LayerProfile(f"layer {i}", f, b, 0, 0, 0, 0, 0) for i, (f, b) in enumerate(layers_s))
    profile = PipelineProfile(0, tuple(boundaries), run["num_micro_batches"], layers, ())
    return simulate(Workload.from_profile(profile, boundaries, step_s=min(run["steps_s"][-1])), timeline=True).timeline
