"""A batch in time: a Gantt picture, and a trace that Perfetto and Chrome open.

Both take :class:`~dynpipe_ds.simulation.Interval` values; a simulated batch has them
(``simulate(..., timeline=True).timeline``), and so has one that was trained (``engine.timeline()``).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dynpipe_ds.simulation import Interval

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

Timelines = Mapping[str, Sequence[Interval]] | Sequence[Interval]
"""Intervals of one batch, or several lists of them by name ("before", "after")."""


class Look(NamedTuple):
    """How a kind of interval is drawn.

    Attributes:
        label: in the legend.
        colour: of Okabe and Ito's palette.
        hatch: tells it from others without colour, as lightness does.
    """

    label: str
    colour: str
    hatch: str | None = None


_MESSAGE = Look("message", "#E69F00", "////")
LOOKS: Mapping[str, Look] = {
    "load": Look("loading", "#F0E442", "--"),
    "forward": Look("forward", "#56B4E9"),
    "backward": Look("backward", "#0072B2"),
    "weight": Look("weight gradients", "#CC79A7", ".."),
    "send": _MESSAGE,
    "recv": _MESSAGE,
    "message": _MESSAGE,
    "step": Look("optimizer step", "#009E73", "xx"),
    "migration": Look("migration", "#D55E00", "\\\\\\\\"),
    "wait": Look("idle", "#E8E8E8"),
}
_NUMBERED = ("forward", "backward", "weight")
_IN_ROWS = LOOKS.keys() - {"message", "wait"}
_BAR_HEIGHT = 0.76
_DARK = "#0a0a0a"  # of numbers in bars, also where a page turns what is black into its own colour
_LEAST_INCHES_OF_NUMBER = 0.14  # a narrower bar gets no micro-batch number
_UNITS = ((1.0, "s", 1.0), (1e-3, "ms", 1e3), (0.0, "µs", 1e6))


def save_gantt(path: str | Path, timelines: Timelines, *, title: str = "") -> Path:
    """Draw what every stage does when; several timelines one above the other, on one time axis.

    A message is a line from the row of the stage that sends it to that of the one that gets it.

    Args:
        path: file to write; its ending chooses the format (``.png``, ``.svg``, ``.pdf``). Missing
            folders are made.
        timelines: intervals, or several lists of them by name.
        title: stands above the picture.

    Returns:
        The path written.

    Raises:
        ValueError: if there is nothing to draw.
    """
    figure = draw_gantt(timelines, title=title)
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=150)
    return target


def draw_gantt(timelines: Timelines, *, title: str = "") -> Figure:
    """Draw what :func:`save_gantt` saves.

    Args:
        timelines: intervals, or several lists of them by name.
        title: stands above the picture.

    Returns:
        The figure.

    Raises:
        ValueError: if there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second, only for pictures
    from matplotlib.figure import Figure

    panels = _by_name(timelines)
    heights = [1 + max(interval.stage for interval in panel) for panel in panels.values()]  # stages of each
    end_s = max(interval.end_s for panel in panels.values() for interval in panel)
    row_inches = 0.42 if max(heights) <= 8 else 0.24
    figure = Figure(figsize=(10, 1.3 + sum(0.45 + row_inches * n for n in heights)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    _, unit, per_second = next(row for row in _UNITS if end_s >= row[0])
    for axes, num_stages, (name, panel) in zip(all_axes, heights, panels.items(), strict=True):
        _draw_panel(axes, panel, num_stages, end_s, per_second)
        length = f"{max(interval.end_s for interval in panel) * per_second:.4g} {unit}"
        axes.set_title(f"{name}: {length}" if name else length, fontsize=10, loc="left")
    all_axes[-1].set_xlabel(f"time ({unit})")
    drawn: set[str] = {interval.kind for panel in panels.values() for interval in panel} | {"wait"}
    figure.legend(handles=_legend(drawn), loc="outside lower center", ncols=5, frameon=False)
    if title:
        figure.suptitle(title)
    return figure


def _by_name(timelines: Timelines, name: str = "") -> dict[str, Sequence[Interval]]:
    panels = dict(timelines) if isinstance(timelines, Mapping) else {name: timelines}
    if not panels or not all(panels.values()):
        raise ValueError("there is a timeline without intervals; simulate with timeline=True")
    return panels


def around_move(before: Sequence[Interval], migrate_s: float, after: Sequence[Interval]) -> list[Interval]:
    """Put a batch, the move of layers that follows it, and the next batch on one time axis.

    Args:
        before: of a batch on the old partition.
        migrate_s: seconds that all stages spend moving.
        after: of a batch on the new partition.

    Returns:
        All intervals, the stages' migration among them, for :func:`save_gantt` or :func:`save_chrome_trace`.
    """
    moves_at_s = max(interval.end_s for interval in before)
    stages = range(1 + max(interval.stage for interval in before))
    moves = [Interval(stage, "migration", -1, moves_at_s, moves_at_s + migrate_s) for stage in stages]
    shift_s = moves_at_s + migrate_s
    later = [i._replace(start_s=i.start_s + shift_s, end_s=i.end_s + shift_s) for i in after]
    return [*before, *moves, *later]


def _draw_panel(
    axes: Any, intervals: Sequence[Interval], num_stages: int, end_s: float, per_second: float
) -> None:
    """One row a stage, the first at the top, on the colour of idleness."""
    idle = LOOKS["wait"].colour
    for stage in range(num_stages):
        axes.broken_barh([(0.0, end_s * per_second)], (stage - _BAR_HEIGHT / 2, _BAR_HEIGHT), color=idle)
    bars: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for i in intervals:
        if i.kind in _IN_ROWS:
            bars.setdefault((i.kind, i.stage), []).append((i.start_s * per_second, i.seconds * per_second))
    for (kind, stage), spans in bars.items():
        axes.broken_barh(
            spans, (stage - _BAR_HEIGHT / 2, _BAR_HEIGHT), facecolor=LOOKS[kind].colour, edgecolor="white",
            linewidth=0.4, hatch=LOOKS[kind].hatch,
        )
    for i in intervals:
        if i.kind == "message":
            step = _step(i)
            rows = i.stage + step * _BAR_HEIGHT / 2, i.stage + step * (1 - _BAR_HEIGHT / 2)
            axes.plot([i.start_s * per_second, i.end_s * per_second], rows, color=_MESSAGE.colour, linewidth=1.2)
    inches_per_s = 9.0 / end_s if end_s else 0.0
    for i in intervals:
        if i.kind in _NUMBERED and (i.end_s - i.start_s) * inches_per_s >= _LEAST_INCHES_OF_NUMBER:
            axes.text(
                (i.start_s + i.end_s) / 2 * per_second, i.stage, str(i.micro_batch), ha="center", va="center",
                fontsize=7 if num_stages <= 8 else 5, color="white" if i.kind == "backward" else _DARK,
            )
    axes.set_xlim(0, end_s * per_second)
    axes.set_ylim(num_stages - 0.5, -0.5)
    axes.set_yticks(range(num_stages))
    axes.tick_params(axis="y", labelsize=8 if num_stages <= 8 else 6)
    axes.set_ylabel("stage")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(kinds: Collection[str]) -> list[Patch]:
    from matplotlib.patches import Patch

    looks = dict.fromkeys(look for kind, look in LOOKS.items() if kind in kinds)
    return [Patch(facecolor=look.colour, hatch=look.hatch, edgecolor="white", label=look.label) for look in looks]


def chrome_trace(timelines: Timelines, *, name: str = "pipeline") -> dict[str, Any]:
    """Bring timelines into the Trace Event Format, which Perfetto and ``chrome://tracing`` read.

    Args:
        timelines: intervals, or several lists of them by name: each is then a process of its own.
        name: name of the process that the stages are the threads of, where there is but one.

    Returns:
        The JSON object; times in microseconds. Every message has an arrow from the computation that it comes from to
        the one that needs it, and where it takes time a slice of its own beside the stages.

    Raises:
        ValueError: if there is nothing to show.
    """
    processes = enumerate(_by_name(timelines, name).items())
    events = [event for pid, (label, intervals) in processes for event in _process(pid, label, intervals)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _process(pid: int, name: str, timeline: Sequence[Interval]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
    for stage in sorted({interval.stage for interval in timeline}):
        # Viewers sort threads by name otherwise, stage 10 before stage 2.
        for what, value in (("name", f"stage {stage}"), ("sort_index", stage)):
            yield {"ph": "M", "pid": pid, "tid": stage, "name": f"thread_{what}", "args": {what: value}}
    computed: dict[tuple[int, str, int], Interval] = {i[:3]: i for i in timeline if i.kind in ("forward", "backward")}
    for interval in timeline:
        if interval.kind == "message":
            yield from _message(pid, interval, computed)
        else:
            yield _slice(pid, interval)


def _slice(pid: int, interval: Interval) -> dict[str, Any]:
    number = str(interval.micro_batch) if interval.micro_batch >= 0 else ""
    return {
        "ph": "X", "pid": pid, "tid": interval.stage, "cat": interval.kind,
        "name": " ".join(word for word in (interval.kind, interval.payload, number) if word),
        "ts": interval.start_s * 1e6, "dur": interval.seconds * 1e6,
        "args": {"micro_batch": interval.micro_batch},
    }


def _message(
    pid: int, message: Interval, computed: Mapping[tuple[int, str, int], Interval]
) -> Iterator[dict[str, Any]]:
    """A slice beside the threads, since messages overlap with computation and each other; and the arrow's two ends."""
    receiver, number = message.stage + _step(message), message.micro_batch
    event = {
        "pid": pid, "cat": "message", "id": f"{message.payload} {message.stage} {number} of {pid}",
        "name": f"{message.payload} {message.stage} to {receiver}",
    }  # fmt: skip
    if message.seconds > 0:
        for phase, time_s in (("b", message.start_s), ("e", message.end_s)):
            yield {"ph": phase, **event, "ts": time_s * 1e6, "args": {"micro_batch": number}}
    kind = "forward" if message.payload == "activation" else "backward"
    ends = [computed.get((stage, kind, number)) for stage in (message.stage, receiver)]
    if ends[0] is not None and ends[1] is not None:
        # An arrow's end belongs to the slice that it lies in, so the first one lies before the end of its slice.
        yield {"ph": "s", **event, "tid": message.stage, "ts": (ends[0].start_s + 0.999 * ends[0].seconds) * 1e6}
        yield {"ph": "f", **event, "tid": receiver, "ts": ends[1].start_s * 1e6, "bp": "e"}


def _step(message: Interval) -> int:
    """From the sender's stage to the receiver's."""
    return 1 if message.payload == "activation" else -1


def save_chrome_trace(path: str | Path, timelines: Timelines, *, name: str = "pipeline") -> Path:
    """Write :func:`chrome_trace` as JSON; open it at https://ui.perfetto.dev.

    Args:
        path: file to write; missing folders are made.
        timelines: intervals, or several lists of them by name.
        name: name of the process that the stages are the threads of, where there is but one.

    Returns:
        The path written.

    Raises:
        ValueError: if there is nothing to show.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(chrome_trace(timelines, name=name)) + "\n", encoding="utf-8")
    return target
