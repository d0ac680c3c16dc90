"""The report page on both runs of a job: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dynpipe_ds.reporting import LayerTimes, Page, add_predictions, draw_gantt, layers_figure
from dynpipe_ds.simulation import Interval
from scenarios.machine import busy_words
from scenarios.report.comparison import UNKNOWN, comparison_rows, first_difference, share, spaced, speedup
from scenarios.report.figures import losses_figure, stages_figure, throughput_figure
from scenarios.report.interval import SAME_PARTITION
from scenarios.report.results import WINDOW, JobResults, Rebalance

OLD_FOLDER = (
    "This folder lacks the journals of both runs, or the record of re-partitions and orders: it was written by an "
    "earlier version, or another job began in it. What follows from layer times is left out; train again to have it."
)


def save_report(path: str | Path, results: JobResults, *, source: str = "") -> Path:
    """Write the page.

    Args:
        path: file to write; missing folders are made.
        results: what the page shows.
        source: where the results came from, named at the bottom.

    Returns:
        The path written.
    """
    return report_page(results, source=source).save(path)


def report_page(results: JobResults, *, source: str = "") -> Page:
    """Make the page.

    Args:
        results: what it shows.
        source: where they came from.
    """
    page = Page(f"{results.settings.get('scenario', 'a job')}: static against dynamic partition", _lead(results))
    for line in notes(results):
        page.note(line)
    page.table(comparison_rows(results.static.summary, results.dynamic.summary))
    _throughput(page, results)
    _layers(page, results)
    _stages(page, results)
    _timelines(page, results)
    _orders(page, results)
    _rebalances(page, results.dynamic.rebalances)
    if results.dynamic.journal is not None:
        add_predictions(page, results.dynamic.journal)
    _job(page, results, source)
    return page


def notes(results: JobResults) -> list[str]:
    """What a reader has to know first.

    Args:
        results: of both runs.
    """
    return [*busy_words(results.busy), *([] if results.has_recording else [OLD_FOLDER])]


def _lead(results: JobResults) -> str:
    """One sentence for somebody who reads nothing else."""
    static, dynamic = results.static.summary, results.dynamic.summary
    moves = len(results.dynamic.rebalanced_at)
    text = f"{moves} re-partition{'' if moves == 1 else 's'}"
    found = speedup(static, dynamic)
    if found is not None:
        text = f"{found.text()} the throughput with {text}"
    elif static.tokens_per_s and dynamic.tokens_per_s:
        text = f"{text}, {SAME_PARTITION}"
    if static.bubble_ratio is not None and dynamic.bubble_ratio is not None:
        text += f"; idle share {static.bubble_ratio:.1%} → {dynamic.bubble_ratio:.1%}"
    return f"{text}."


def _throughput(page: Page, results: JobResults) -> None:
    page.heading("Throughput and loss")
    turns = "Higher is better. Both runs train in turns, so a slow machine slows down both."
    page.charts([
        (throughput_figure(results), "Throughput", "Throughput of every batch of both runs", turns),
        (losses_figure(results), "Loss", "Loss of every batch of both runs", _losses_caption(results)),
    ])  # fmt: skip


def _losses_caption(results: JobResults) -> str:
    at = first_difference(results.static.summary.losses, results.dynamic.summary.losses)
    return (
        "Loss: the two lines lie on each other, bit for bit." if at is None
        else f"Loss: the runs differ from batch {at} on, although they should not."
    )  # fmt: skip


def _layers(page: Page, results: JobResults) -> None:
    runs = (("static partition", results.static), ("dynamic partition", results.dynamic))
    times = {name: LayerTimes.of(run.journal) for name, run in runs if run.journal is not None}
    if not times:
        return
    page.heading("What every layer costs over training")
    page.picture(
        layers_figure(times), "Layer times and stage boundaries",
        described="Heat map of seconds by layer and batch, with stage boundaries",
        caption="Darker means slower. Lines are stage boundaries: layers between two lines are on one stage.",
    )


def _stages(page: Page, results: JobResults) -> None:
    dynamic, end = results.dynamic, len(results.dynamic.batches_s)
    first = dynamic.rebalances[0].batch if dynamic.rebalances else end
    last = dynamic.rebalances[-1].batch if dynamic.rebalances else 0
    bars = {
        "before the first re-partition": dynamic.stages_of(range(max(0, first - WINDOW), first)) if last else None,
        "static, at the end": results.static.stages_of(range(max(0, end - WINDOW), end)),
        "dynamic, at the end": dynamic.stages_of(range(max(last, end - WINDOW), end)),
    }
    known = {name: busy_s for name, busy_s in bars.items() if busy_s}
    if not known:
        return
    page.heading("Stage times before and after")
    page.picture(
        stages_figure(known), "What every stage computes", described="Bars of the computing time of every stage",
        caption=f"Measured; medians of up to {WINDOW} batches. The slowest stage (dotted line) sets the pace of all. "
        "At the end, both runs did the same work in turns"
        + ("; before the first re-partition layers may have cost otherwise." if last else "."),
    )


def timelines(results: JobResults) -> dict[str, tuple[Interval, ...]]:
    """The newest profiled batch of each run, by its name, its boundaries and its order; older results have none.

    Args:
        results: of both runs.
    """
    found = {}
    for run in (results.static, results.dynamic):
        if run.timeline and run.recording is not None and run.recording.orders:
            newest = run.recording.orders[-1]
            found[f"{run.summary.label}, {spaced(newest['boundaries'])}, {newest['order']}"] = run.timeline
    return found


def _timelines(page: Page, results: JobResults) -> None:
    found = timelines(results)
    if not found:
        return
    page.heading("One batch in time")
    page.picture(
        draw_gantt(found), "The newest profiled batch of each run",
        described="Timeline of forwards, backwards, messages and idle time of every stage",
        caption="Measured; both runs have done the same work by then. Numbers are micro-batches. Lines are messages, "
        "from being sent to being taken; the clocks of the ranks are set by them. The option --trace writes the same "
        "for Perfetto.",
    )


def _orders(page: Page, results: JobResults) -> None:
    """Which order ran when, and what was predicted of it."""
    recording = results.dynamic.recording
    if recording is None or not recording.orders:
        return
    rows = [["from batch", "boundaries", "order", "a batch, predicted (s)", "measured (s)", "measured / predicted"]]
    for phase in recording.orders:
        times_s = [median(phase[key]) if phase[key] else None for key in ("predicted_s", "measured_s")]
        ratio = UNKNOWN if None in times_s or not times_s[0] else f"{times_s[1] / times_s[0]:.3f}"
        cells = [str(phase["first_batch"]), spaced(phase["boundaries"]), phase["order"]]
        rows.append([*cells, *map(_number, times_s), ratio])
    page.heading("Orders")
    page.table(rows, words=(1, 2))
    page.text(
        "In which order the stages of the dynamic run ran forwards and backwards; the static run runs 1F1B. A batch is "
        "its forwards and backwards, without the optimizer step. Predicted: by the simulator, from the layer times of "
        "the same batches, with messages that take no time. Medians of the first profiled batches.", small=True,
    )
    for line in whole_backwards(results):
        page.text(line)


def whole_backwards(results: JobResults) -> list[str]:
    """Say which stages of the dynamic run had backwards that an order splits and that ran whole.

    Args:
        results: of both runs.
    """
    found = results.dynamic.whole_backwards.items()
    return [f"Stage {stage} ran backwards whole, since they can't be split: {'; '.join(why)}." for stage, why in found]


def _rebalances(page: Page, rebalances: Sequence[Rebalance]) -> None:
    page.heading("Re-partitions")
    if not rebalances:
        page.text("The partition never changed.")
        return
    head = [
        "after batch", "boundaries before", "after", "predicted gain", "realised gain", "by layer times",
        "batch had it stayed (s)", "batch since (s)", "MiB moved", "took (s)", "paid back in",
    ]  # fmt: skip
    rows = [
        [
            str(r.batch), _spaced(r.before), _spaced(r.after), share(r.predicted_gain),
            share(r.realised_gain, r.realised_noise), share(r.same_work_gain),
            _number(r.batch_stayed_s), _number(r.batch_moved_s),
            UNKNOWN if r.bytes_moved is None else f"{r.bytes_moved / 2**20:.1f}", _number(r.cost_s), payback(r),
        ]
        for r in rebalances
    ]  # fmt: skip
    page.table([head, *rows], words=(1, 2))
    page.text(
        "Predicted gain: share by which the slowest stage was to shrink. Realised gain: by how much its measured time "
        "did, against the static run's in the same batches (both do the same work in turns), medians of up to "
        f"{WINDOW} batches before and after, with its standard error. By layer times: the slowest stage against what "
        "it would have been with the boundaries of before, by the layer times of the batches after. Had it stayed: the "
        "static run's batches, times how the two runs compared before.", small=True,
    )


def payback(rebalance: Rebalance) -> str:
    """Say after how many batches a move has paid for itself.

    Args:
        rebalance: with what it cost, and what a batch took with and without it.
    """
    stayed_s, moved_s, cost_s = rebalance.batch_stayed_s, rebalance.batch_moved_s, rebalance.cost_s
    if stayed_s is None or moved_s is None or cost_s is None:
        return UNKNOWN
    gain, noise = rebalance.realised_gain, rebalance.realised_noise
    if gain is not None and noise is not None and abs(gain) <= noise:
        return "lost in noise"
    if moved_s >= stayed_s:
        return "not yet seen"
    batches = max(1, -int(-cost_s // (stayed_s - moved_s)))
    return f"{batches:,} batch{'' if batches == 1 else 'es'}"


def _job(page: Page, results: JobResults, source: str) -> None:
    rows = {key: _flat(value) for key, value in results.settings.items() if value is not None}
    rows["environment"] = _flat(results.environment)
    page.heading("The job")
    page.settings({**rows, **({"read from": source} if source else {})})


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = {key: f"{{{_flat(item)}}}" if isinstance(item, Mapping) else item for key, item in value.items()}
        return ", ".join(f"{key}: {item}" for key, item in inner.items())
    return str(value)


def _spaced(boundaries: Sequence[int] | None) -> str:
    return UNKNOWN if boundaries is None else spaced(boundaries)


def _number(value_s: float | None) -> str:
    return UNKNOWN if value_s is None else f"{value_s:.3f}"
