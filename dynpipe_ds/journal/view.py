"""A run on a terminal: what :mod:`~dynpipe_ds.journal.standing` says, drawn with ``rich``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dynpipe_ds.journal.read import Journal
from dynpipe_ds.journal.standing import in_columns, stages_over_time, standing

_LEVELS = "▁▂▃▄▅▆▇█"
_COLOURS = ("blue", "yellow", "green", "magenta", "cyan", "red")  # of stages in turn; their numbers stand there, too
_LEAST_ROWS, _MOST_ROWS = 4, 14  # of the picture of layers
_NEWEST_MOVES = 5
_NARROW = 72  # columns below which tables leave out what can be spared
_UNKNOWN = "n/a"


class RunView:
    """What is shown of a run; it fits the width that it gets.

    Args:
        journal: that tells of it.
        others: journals beside it, which are named.
    """

    def __init__(self, journal: Journal, others: Sequence[str] = ()) -> None:
        self._journal = journal
        self._others = others

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Called by rich."""
        width = options.max_width
        now = standing(self._journal)
        if now["is_starting"]:
            yield _starting(now)
            return
        parts: list[RenderableType] = [_head(now)]
        if "stages" in now:
            rows = _rows_left(console.size.height, now) if console.is_terminal else _MOST_ROWS
            parts += [_stages(now, width), _layers(self._journal, rows, width - 4)]
        parts += [_series(self._journal, width - 4), *_moves(now, width)]
        if self._others:
            parts.append(Text(f"other runs here, by --run NAME: {', '.join(self._others)}", style="dim"))
        yield Group(*parts)


def _rows_left(height: int, now: Mapping[str, Any]) -> int:
    """Rows that a screen has for the picture of layers: all else takes some of its own."""
    return min(_MOST_ROWS, max(_LEAST_ROWS, height - 24 - len(now["stages"]) - min(_NEWEST_MOVES, len(now["moves"]))))


def _head(now: Mapping[str, Any]) -> RenderableType:
    facts = [
        f"batch {now['num_batches']:,}", f"loss {_number(now['loss'])}", f"{_seconds(now['batch_s'])} a batch",
        f"{_number(now['samples_per_s'])} samples/s",
    ]  # fmt: skip
    if "stages" in now:
        slowest = now["limiting_stage"]
        facts += [f"idle {now['bubble_ratio']:.1%}", f"stage {slowest} limits", f"order {now['order']}"]
    text = Text(" · ".join(fact.replace(" ", "\N{NO-BREAK SPACE}") for fact in facts), style="bold")
    silent = f"\nlast line {_seconds(now['silent_s'])} ago"
    text.append(silent, style="bold red" if now["is_late"] else "dim")
    if now["has_ended"]:
        text.append(": the job has ended", style="dim")
    if now["is_late"]:
        text.append(": the job was killed, or it hangs", style="bold red")
    if now["resumed_at"]:
        text.append(f" · continued at batch {', '.join(map(str, now['resumed_at']))}", style="dim")
    return Panel(text, title=now["journal"], title_align="left", border_style="dim")


def _starting(now: Mapping[str, Any]) -> RenderableType:
    """A job whose first batch is not done: nothing of the run before it is shown."""
    what = "a job ended {} ago before its first batch was done" if now["has_ended"] else (
        "a job began {} ago; its first batch is not done yet"
    )  # fmt: skip
    text = Text(what.format(_seconds(now["silent_s"])), style="bold")
    if now["num_batches_before"]:
        text.append(f"\nthe journal has {now['num_batches_before']:,} batches of the run before it", style="dim")
    return Panel(text, title=now["journal"], title_align="left", border_style="dim")


def _stages(now: Mapping[str, Any], width: int) -> RenderableType:
    """One row a stage, with a bar: what it computes, the optimizer step, and what is idle."""
    table = Table(box=None, pad_edge=False, padding=(0, 1), expand=True)
    table.add_column("stage")
    table.add_column("layers")
    table.add_column("computes", justify="right")
    table.add_column("idle", justify="right")
    if width >= _NARROW:
        table.add_column("memory", justify="right")
    table.add_column("█ computes  ▒ step  ░ idle", ratio=1, no_wrap=True)
    most_s = max(s["busy_s"] + s["waiting_s"] + s["fill_drain_s"] + s["step_s"] for s in now["stages"]) or 1.0
    for stage in now["stages"]:
        last = stage["first_layer"] + stage["num_layers"] - 1
        colour = _COLOURS[stage["stage"] % len(_COLOURS)]
        cells: list[RenderableType] = [
            Text(f"{stage['stage']}{' limits' if stage['limits'] else ''}", style="bold" if stage["limits"] else ""),
            f"{stage['first_layer']}-{last}" if stage["num_layers"] else "none",
            _seconds(stage["busy_s"]), f"{stage['bubble_ratio']:.1%}",
        ]  # fmt: skip
        if width >= _NARROW:
            cells.append(_bytes(stage["peak_memory_bytes"]))
        idle_s = stage["waiting_s"] + stage["fill_drain_s"]
        cells.append(_Bar([(stage["busy_s"], "█"), (stage["step_s"], "▒"), (idle_s, "░")], most_s, colour))
        table.add_row(*cells)
    title = f"stages in batch {now['profiled_batch']}"
    return Panel(table, title=title, title_align="left", border_style="dim")


class _Bar:
    """Parts of a length, each drawn with a sign of its own, as wide as there is room."""

    def __init__(self, parts: Sequence[tuple[float, str]], most: float, colour: str) -> None:
        self._parts, self._most, self._colour = parts, most, colour

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text, done, drawn = Text(style=self._colour, no_wrap=True), 0.0, 0
        for length, sign in self._parts:
            done += length
            upto = round(options.max_width * done / self._most)
            text.append(sign * (upto - drawn))
            drawn = upto
        yield text


def _layers(journal: Journal, most_rows: int, width: int) -> RenderableType:
    """Which stage held each layer over time: the number of the stage, in its colour."""
    rows = stages_over_time(journal, most_rows, width - 6)
    num_layers = journal.profiles[-1].boundaries[-1]
    text = Text(no_wrap=True)
    for i, row in enumerate(rows):
        layer = round(i * (num_layers - 1) / max(1, len(rows) - 1))
        text.append("\n" if i else "")
        text.append(f"{layer:>4}  ", style="dim")
        for stage in row:
            colour = _COLOURS[stage % len(_COLOURS)]
            text.append(str(stage % 10), style=f"{colour} reverse" if stage % 2 else colour)
    first = journal.profiles[0].batch
    title = f"stage of each layer, batches {first} to {journal.profiles[-1].batch}"
    return Panel(text, title=title, title_align="left", border_style="dim")


def _series(journal: Journal, width: int) -> RenderableType:
    """Losses, seconds and idle shares over time, a line each."""
    memory = [max(stage.peak_memory_bytes for stage in each.stages) for each in journal.profiles]
    series: dict[str, tuple[list[float], str]] = {
        "loss": ([each.loss for each in journal.batches if each.loss is not None], ".4g"),
        "batch s": ([each.seconds for each in journal.batches], ".3g"),
        "idle share": ([each.bubble_ratio for each in journal.profiles], ".1%"),
        "slowest stage s": ([max(stage.busy_s for stage in each.stages) for each in journal.profiles], ".3g"),
        "most memory MiB": ([m / 2**20 for m in memory] if any(memory) else [], ",.0f"),
    }
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1))
    for name, (values, form) in series.items():
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            # Of very long batches, the first one say, only the height is lost: their number stands beside it.
            ends = f"{values[0]:{form}} → {values[-1]:{form}}"
            table.add_row(Text(name, style="dim"), _sparkline(finite, max(8, width - 36)), Text(ends, style="dim"))
    first, last = (journal.batches[i].batch for i in (0, -1)) if journal.batches else (0, 0)
    title = f"over time, batches {first} to {last}"
    return Panel(table, title=title, title_align="left", border_style="dim")


def _sparkline(values: Sequence[float], columns: int) -> str:
    shown = in_columns(values, columns)
    low, high = min(shown), sorted(shown)[math.ceil(0.98 * (len(shown) - 1))]
    span = (high - low) or 1.0
    top = len(_LEVELS) - 1
    return "".join(_LEVELS[min(top, round(top * (value - low) / span))] for value in shown)


def _moves(now: Mapping[str, Any], width: int) -> Iterator[RenderableType]:
    """The newest changes of partition and of the number of workers."""
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    compiles = any(move["compiling_s"] for move in now["moves"])
    more_names = ("MiB", "took", *["compiled"] * compiles) if width >= _NARROW else ()
    names = ("after batch", "from", "to", "predicted gain", *more_names)
    for name in names:
        table.add_column(name, justify="left" if name in ("from", "to") else "right", overflow="fold")
    for move in now["moves"][-_NEWEST_MOVES:]:
        compiled = [_seconds(move["compiling_s"])] if compiles else []
        more = [f"{move['bytes_moved'] / 2**20:.1f}", _seconds(move["seconds"]), *compiled] if width >= _NARROW else []
        boundaries = (_spaced(move[key]) for key in ("before", "after"))
        table.add_row(str(move["batch"]), *boundaries, f"{move['predicted_gain']:.1%}", *more)
    count = len(now["moves"])
    title = "no move yet" if not count else f"{count} move{'s' * (count > 1)}" + (
        f", the newest {_NEWEST_MOVES}" if count > _NEWEST_MOVES else ""
    )
    yield Panel(table if count else Text("layers are where they were", style="dim"),
                title=title, title_align="left", border_style="dim")  # fmt: skip
    if now["compiling_s"]:
        yield Text(f"torch.compile took {_seconds(now['compiling_s'])} in profiled batches", style="dim")
    for repack in now["repacks"]:
        old, new = (len(repack[key]) - 1 for key in ("before", "after"))
        yield Text(f"re-packed after batch {repack['batch']} from {old} to {new} stages: {repack['reason']}")


def _spaced(boundaries: Sequence[int]) -> str:
    return "[" + " ".join(map(str, boundaries)) + "]"


def _number(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:,.4g}"


def _seconds(value: float | None) -> str:
    if value is None:
        return _UNKNOWN
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s" if value < 120 else f"{value / 60:,.0f} min"


def _bytes(value: int | None) -> str:
    return _UNKNOWN if value is None else f"{value / 2**20:,.0f} MiB" if value < 2**30 else f"{value / 2**30:,.1f} GiB"
