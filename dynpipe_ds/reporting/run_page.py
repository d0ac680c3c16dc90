"""The page on one run, from its journal: ``dynpipe report``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from itertools import groupby
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from dynpipe_ds.config import SECTION, DynamicPipelineConfig, parse_config
from dynpipe_ds.journal.read import Journal, ProfileTold
from dynpipe_ds.journal.standing import in_columns
from dynpipe_ds.planning import PredictedBatch, predict_batches
from dynpipe_ds.reporting.layers import LayerTimes, layers_figure, scale
from dynpipe_ds.reporting.page import Page
from dynpipe_ds.reporting.themed import DASHES, MUTED, SERIES, dress, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNKNOWN = "n/a"
_MOST_POINTS = 400  # of a line
_LAST = 10  # batches or profiles that a median is of
_MOST_STAGES = 8  # drawn as a line each
_NO_SHORTER = " No order that splits backwards is shorter than 1F1B."
_NO_HALVES = (
    " Planned orders are left out: no backward was split in this run, so it is not known what could be done later."
)
_PREDICTED = (
    "By the simulator, from the layer times that decisions rested on last. A batch is its forwards and backwards with "
    "their messages, without the optimizer step. Bold: the shortest."
)


def run_page(journal: Journal) -> Page:
    """Make the page on a run.

    Args:
        journal: that tells of it.

    Returns:
        The page.
    """
    profiles = journal.profiles
    page = Page(f"Run: {journal.file.parent.name}", _lead(journal))
    page.facts(_facts(journal))
    page.text(f"Medians of the last {_LAST} batches; where stages are concerned, of profiled ones.", small=True)
    page.heading("Over time")
    page.charts(list(_charts(journal)))
    if profiles:
        page.heading("What every layer costs, and where it is")
        page.picture(
            layers_figure({"layer": LayerTimes.of(journal)}), "Layer times and stage boundaries",
            described="Heat map of seconds by layer and batch, with stage boundaries",
            caption="Darker means slower. Lines are stage boundaries: layers between two lines are on one stage.",
        )
        add_predictions(page, journal)
        _stages(page, profiles)
    _moves(page, journal)
    page.heading("The job")
    page.settings(_about(journal))
    return page


def add_predictions(page: Page, journal: Journal) -> None:
    """Add what a batch would take on other partitions and in other orders.

    Args:
        page: to add to.
        journal: with one profile at least.
    """
    profile = journal.last_profile
    assert profile is not None, "the caller has seen profiles"
    page.heading("A batch under other partitions and orders")
    try:
        rows = predict_batches(
            profile, journal.partitions[0][1], config=_config(journal), speeds=journal.speeds, pinned=journal.pinned
        )
    except ValueError as error:
        page.text(f"Nothing is predicted: {error}.")
        return
    _predictions(page, rows)
    has_halves = any(layer.weight_s for layer in profile.layers)
    is_usual = has_halves and all(row.order == "1F1B" for row in rows)
    page.text(_PREDICTED + ("" if has_halves else _NO_HALVES) + (_NO_SHORTER if is_usual else ""), small=True)
    for row in rows:
        if row.refusal:
            page.text(f"No {row.partition}: {row.refusal}.", small=True)


def _predictions(page: Page, rows: Sequence[PredictedBatch]) -> None:
    known = [row.batch_s for row in rows if row.batch_s is not None]
    most_s, now_s = max(known), next(row.batch_s for row in rows if row.partition == "as it is now")
    table = [["partition", "order", "boundaries", "a batch", "against now", "idle"]]
    for row in rows:
        change = UNKNOWN if row.batch_s is None or not now_s else _change(row.batch_s / now_s - 1)
        idle = UNKNOWN if row.bubble_ratio is None else f"{row.bubble_ratio:.1%}"
        cells = [row.partition, row.order, spaced(row.boundaries) if row.boundaries else "none"]
        table.append([*cells, shown_s(row.batch_s), change, idle])
    shares = [None if row.batch_s is None else row.batch_s / most_s for row in rows]
    best = next(i for i, row in enumerate(rows) if row.batch_s == min(known))
    page.table(table, bars=(3, shares), best=best, words=(1, 2))


def _change(share: float) -> str:
    return "the same" if abs(share) < 5e-4 else f"{share:+.1%}".replace("-", "−")


def _config(journal: Journal) -> DynamicPipelineConfig | None:
    """The section as the job had it; of a later version's, the defaults."""
    try:
        return parse_config({SECTION: journal.about.get("settings", {})})
    except ValueError:
        return None


def _lead(journal: Journal) -> str:
    count, moves = len(journal.batches), len(journal.moves)
    text = f"{count:,} batches with {moves} change{'' if moves == 1 else 's'} of partition"
    profiles = journal.profiles
    if moves and profiles:
        first, last = _idle(profiles[:_LAST]), _idle(profiles[-_LAST:])
        text += f"; idle share {first:.1%} at first, {last:.1%} at the end"
    return f"{text}."


def _idle(profiles: Sequence[ProfileTold]) -> float:
    return median(profile.bubble_ratio for profile in profiles)


def _facts(journal: Journal) -> dict[str, str]:
    losses = [each.loss for each in journal.batches if each.loss is not None]
    seconds = [each.seconds for each in journal.batches]
    samples = journal.about.get("samples_a_batch")
    facts = {
        "last loss": f"{losses[-1]:.5g}" if losses else UNKNOWN,
        "a batch": shown_s(median(seconds[-_LAST:])) if seconds else UNKNOWN,
        "samples/s": f"{samples / median(seconds[-_LAST:]):,.4g}" if samples and seconds else UNKNOWN,
    }
    if journal.profiles:
        newest = journal.profiles[-1]
        limits = [profile.limiting_stage for profile in journal.profiles[-_LAST:]]
        facts |= {
            "idle share": f"{_idle(journal.profiles[-_LAST:]):.1%}",
            "limiting stage": str(max(set(limits), key=limits.count)), "order": newest.order,
            "boundaries": spaced(newest.boundaries),
        }  # fmt: skip
    return facts


# -- over time -------------------------------------------------------------------------------


def _charts(journal: Journal) -> Any:
    batches, profiles = journal.batches, journal.profiles
    moved_at = [move.batch for move in journal.moves]
    losses = [(each.batch, each.loss) for each in batches if each.loss is not None and math.isfinite(each.loss)]
    if losses:
        yield _chart("Loss", "loss of every batch", {"": losses}, "", [])
    yield _chart(
        "Seconds of a batch", "s", {"": [(each.batch, each.seconds) for each in batches]},
        "On the first rank, with profiling, deciding and moving." + _dotted(moved_at), moved_at, from_zero=True,
    )
    if not profiles:
        return
    yield _chart(
        "What every stage computes", "s a batch", _by_stage(profiles, lambda stage: stage.busy_s),
        "The slowest stage sets the pace of all." + _dotted(moved_at), moved_at, from_zero=True,
    )
    yield _chart(
        "Idle share", "of the time that stages compute or wait",
        {"": [(each.batch, each.bubble_ratio) for each in profiles]}, "Mean over the stages." + _dotted(moved_at),
        moved_at, from_zero=True, percent=True,
    )
    if any(stage.peak_memory_bytes for profile in profiles for stage in profile.stages):
        memory = _by_stage(profiles, lambda stage: stage.peak_memory_bytes / 2**20)
        yield _chart("Memory", "MiB, most so far", memory, "Most that was allocated.", moved_at, from_zero=True)


def _dotted(moved_at: Sequence[int]) -> str:
    return " Dotted: layers moved." if moved_at else ""


def _by_stage(profiles: Sequence[ProfileTold], value: Callable[[Any], float]) -> dict[str, list[tuple[int, float]]]:
    """A line a stage; of many stages, the largest, the mean and the least."""
    if max(len(profile.stages) for profile in profiles) > _MOST_STAGES:
        of: dict[str, Callable[[list[float]], float]] = {"largest": max, "mean": fmean, "least": min}
        return {
            name: [(p.batch, combine([value(s) for s in p.stages])) for p in profiles]
            for name, combine in of.items()
        }  # fmt: skip
    lines: dict[str, list[tuple[int, float]]] = {}
    for profile in profiles:
        for number, stage in enumerate(profile.stages):
            lines.setdefault(f"stage {number}", []).append((profile.batch, value(stage)))
    return lines


def _chart(
    title: str, unit: str, lines: dict[str, list[tuple[int, float]]], caption: str, moved_at: Sequence[int],
    *, from_zero: bool = False, percent: bool = False,
) -> tuple[Figure, str, str, str]:
    figure = new_figure(4.2, 2.7)
    axes = figure.subplots()
    for i, (name, points) in enumerate(lines.items()):
        batches, values = zip(*points, strict=True)
        colour, dash = SERIES[i % len(SERIES)], DASHES[i % len(DASHES)]
        axes.plot(
            in_columns(batches, _MOST_POINTS), in_columns(values, _MOST_POINTS), color=colour, linestyle=dash,
            linewidth=1.7, label=name,
        )
    for batch in moved_at:
        axes.axvline(batch - 0.5, color=MUTED, linestyle=(0, (1, 2)), linewidth=1)
    dress(axes, x="batch", y=unit)
    if from_zero:
        axes.set_ylim(0, 1.25 * scale([value for points in lines.values() for _, value in points]))
    if percent:
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=8.5, labelcolor=MUTED, ncols=4, loc="upper center")
    figure_of = f"{title}: {', '.join(name for name in lines if name) or unit} by batch"
    return figure, title, figure_of, caption


# -- tables ----------------------------------------------------------------------------------


def _stages(page: Page, profiles: Sequence[ProfileTold]) -> None:
    """The stages at the end: medians of the last profiles on the last partition."""
    newest = profiles[-1]
    last = [each for each in profiles[-_LAST:] if each.boundaries == newest.boundaries]
    page.heading("Stages at the end")
    rows = [["stage", "layers", "computes", "waits", "fills and drains", "optimizer step", "idle", "memory"]]
    busy = [median(each.stages[s].busy_s for each in last) for s in range(len(newest.stages))]
    for s, (low, high) in enumerate(zip(newest.boundaries, newest.boundaries[1:], strict=False)):
        stages = [each.stages[s] for each in last]
        waits, fills, steps = (
            median(getattr(stage, name) for stage in stages) for name in ("waiting_s", "fill_drain_s", "step_s")
        )
        memory = stages[-1].peak_memory_bytes
        rows.append([
            str(s), f"{low}–{high - 1}" if high > low else "none", *map(shown_s, (busy[s], waits, fills, steps)),
            f"{median(stage.bubble_ratio for stage in stages):.1%}",
            f"{memory / 2**20:,.0f} MiB" if memory else UNKNOWN,
        ])  # fmt: skip
    most = max(busy) or 1.0
    page.table(rows, bars=(2, [s / most for s in busy]), best=busy.index(max(busy)), words=(1,))
    page.text(
        f"Seconds of a batch, medians of {len(last)} profiled batch{'' if len(last) == 1 else 'es'}. Bold: the stage "
        "that limits. Idle is the share of waiting, filling and draining in all but the step.", small=True,
    )


_WHAT_COMPILED = " Compiled: seconds of torch.compile on the slowest rank, where moved layers first ran."


def _moves(page: Page, journal: Journal) -> None:
    page.heading("Changes of partition")
    if not journal.moves:
        page.text("Layers stayed where they were.")
    else:
        compiled = [journal.compiled_after(move) for move in journal.moves]
        more = ["compiled"] if any(compiled) else []
        rows = [["after batch", "boundaries before", "after", "predicted gain", "moved", "took", *more]]
        for move, compiled_s in zip(journal.moves, compiled, strict=True):
            moved = f"{move.bytes_moved / 2**20:,.1f} MiB"
            gain = f"{move.predicted_gain:.1%}" if move.predicted_gain else UNKNOWN
            row = [str(move.batch), spaced(move.before), spaced(move.after), gain, moved, shown_s(move.seconds)]
            rows.append([*row, shown_s(compiled_s)] if more else row)
        page.table(rows, words=(1, 2))
        gain = "Predicted gain: by how much the slowest stage was to get shorter."
        page.text(gain + _WHAT_COMPILED * len(more), small=True)
    for repack in journal.repacks:
        page.text(f"{str(repack)[:1].upper()}{str(repack)[1:]}.")
    orders = [(order, next(group).batch) for order, group in groupby(journal.profiles, key=lambda each: each.order)]
    if len(orders) > 1:
        page.text("Orders: " + ", ".join(f"{order} from batch {batch}" for order, batch in orders) + ".")


def _about(journal: Journal) -> dict[str, str]:
    about = journal.about
    began = datetime.fromtimestamp(about["began"], tz=timezone.utc)
    values = {
        "layers": str(len(about["layers"])), "ranks": str(about["num_ranks"]), "device": about["device"],
        "samples a batch": str(about["samples_a_batch"]), "began (UTC)": f"{began:%Y-%m-%d %H:%M}",
        **{f'"{name}"': str(value) for name, value in about["settings"].items()},
    }  # fmt: skip
    if journal.resumed_at:
        values["continued at batch"] = ", ".join(map(str, journal.resumed_at))
    if journal.num_unreadable:
        values["lines that could not be read"] = str(journal.num_unreadable)
    return {**values, "read from": str(journal.file)}


def spaced(boundaries: Sequence[int]) -> str:
    """Show boundaries as everywhere: ``[0 5 9 14]``.

    Args:
        boundaries: S + 1 layer indices.
    """
    return "[" + " ".join(map(str, boundaries)) + "]"


def shown_s(value: float | None) -> str:
    """Show seconds, short ones as milliseconds.

    Args:
        value: seconds; ``None`` where they are not known.
    """
    if value is None:
        return UNKNOWN
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
