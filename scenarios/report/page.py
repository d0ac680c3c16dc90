"""The report page: one HTML file that needs nothing else, images inline."""

from __future__ import annotations

import base64
import io
import tempfile
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from dynpipe_ds.reporting import save_gantt
from dynpipe_ds.simulation import Interval
from scenarios.machine import busy_words
from scenarios.report.comparison import UNKNOWN, comparison_rows, first_difference, share, spaced, speedup
from scenarios.report.figures import batches_figure, heat_map_figure, stages_figure
from scenarios.report.interval import SAME_PARTITION
from scenarios.report.results import WINDOW, JobResults, Rebalance

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 68rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; }
h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; padding-bottom: .2rem; }
p.lead { font-size: 1.1rem; margin-top: .2rem; }
p.note { background: #fff6e0; border-left: 4px solid #e69f00; padding: .5rem .8rem; }
figure { margin: 0; } img { max-width: 100%; height: auto; }
figcaption, .small { color: #555; font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { text-align: right; border-bottom: 1px solid #eee; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.indented { padding-left: 1.8rem; }
thead th { border-bottom: 2px solid #999; vertical-align: bottom; white-space: normal; }
th, td { padding: .25rem .5rem; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; }
"""
OLD_FOLDER = (
    "This folder was written before layer times and re-partitions were recorded. The heat map, the orders, the "
    "timelines and the predicted gains are left out; train again to have them."
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
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render_report(results, source=source), encoding="utf-8")
    return target


def render_report(results: JobResults, *, source: str = "") -> str:
    """Return the page as HTML.

    Args:
        results: what it shows.
        source: where they came from.
    """
    scenario = escape(str(results.settings.get("scenario", "a job")))
    parts = [
        f"<h1>{scenario}: static against dynamic partition</h1>",
        f'<p class="lead">{_lead(results)}</p>',
        *(f'<p class="note">{escape(line)}</p>' for line in notes(results)),
        _table(comparison_rows(results.static.summary, results.dynamic.summary)),
        "<h2>Throughput</h2>",
        _picture(
            batches_figure(results), "Throughput and loss of every batch of both runs",
            "Throughput: higher is better; both runs alternate every few batches, so a slow machine slows down both. "
            + _losses_caption(results),
        ),
        _heat_map(results),
        _stages(results),
        _timelines(results),
        _orders(results),
        _rebalances(results.dynamic.rebalances),
        _job(results, source),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{scenario}: report</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>{_STYLE}</style></head>\n'
        f"<body>\n{body}\n</body></html>\n"
    )


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
    return f"{escape(text)}."


def _losses_caption(results: JobResults) -> str:
    at = first_difference(results.static.summary.losses, results.dynamic.summary.losses)
    return (
        "Loss: the two lines lie on each other, bit for bit." if at is None
        else f"Loss: the runs differ from batch {at} on, although they should not."
    )  # fmt: skip


def _heat_map(results: JobResults) -> str:
    runs = (("static partition", results.static), ("dynamic partition", results.dynamic))
    recorded = {name: run.recording for name, run in runs if run.recording is not None}
    if not recorded:
        return ""
    rows = max(recording.batches_a_row for recording in recorded.values())
    grain = f" Each column is the mean of {rows} batches." if rows > 1 else ""
    return "<h2>What every layer costs over training</h2>" + _picture(
        heat_map_figure(recorded), "Heat map of seconds by layer and batch, with stage boundaries",
        f"Dark is dear. Lines are the stage boundaries: layers between two lines are on one stage.{grain}",
    )


def _stages(results: JobResults) -> str:
    dynamic, end = results.dynamic, len(results.dynamic.batches_s)
    first = dynamic.rebalances[0].batch if dynamic.rebalances else end
    last = dynamic.rebalances[-1].batch if dynamic.rebalances else 0
    bars = {
        "before the first re-partition": dynamic.stages_of(range(max(0, first - WINDOW), first)) if last else None,
        "static partition at the end": results.static.stages_of(range(max(0, end - WINDOW), end)),
        "dynamic partition at the end": dynamic.stages_of(range(max(last, end - WINDOW), end)),
    }
    known = {name: busy_s for name, busy_s in bars.items() if busy_s}
    if not known:
        return ""
    return "<h2>Stage times before and after</h2>" + _picture(
        stages_figure(known), "Bars of the computing time of every stage",
        f"Measured; medians of up to {WINDOW} batches. The slowest stage (dotted line) sets the pace of all. "
        "Static and dynamic at the end did the same work in turns"
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


def _timelines(results: JobResults) -> str:
    found = timelines(results)
    if not found:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        image = save_gantt(Path(folder) / "timeline.png", found).read_bytes()
    return "<h2>One batch in time</h2>" + _image(
        image, "Timeline of forwards, backwards, messages and idle time of every stage",
        "Measured: the newest profiled batch of each run, by which both have done the same work. Numbers are "
        "micro-batches. Lines are messages, from being sent to being taken. The clocks of the ranks are set by them. "
        "The option --trace writes the same for Perfetto.",
    )


def _orders(results: JobResults) -> str:
    """Which order ran when, and what was predicted of it."""
    recording = results.dynamic.recording
    if recording is None or not recording.orders:
        return ""
    rows = [["from batch", "boundaries", "order", "a batch, predicted (s)", "measured (s)", "measured / predicted"]]
    for phase in recording.orders:
        times_s = [median(phase[key]) if phase[key] else None for key in ("predicted_s", "measured_s")]
        ratio = UNKNOWN if None in times_s or not times_s[0] else f"{times_s[1] / times_s[0]:.3f}"
        cells = [str(phase["first_batch"]), spaced(phase["boundaries"]), phase["order"]]
        rows.append([*cells, *map(_number, times_s), ratio])
    return "<h2>Orders</h2>" + _table(rows) + (
        '<p class="small">In which order the stages of the dynamic run ran forwards and backwards; the static run '
        "runs 1F1B. A batch is its forwards and backwards, without the optimizer step. <b>Predicted</b>: by the "
        "simulator, from the layer times of the same batches, with messages that take no time. Medians of the first "
        "profiled batches.</p>"
    )


def _rebalances(rebalances: Sequence[Rebalance]) -> str:
    if not rebalances:
        return "<h2>Re-partitions</h2><p>The partition never changed.</p>"
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
    return "<h2>Re-partitions</h2>" + _table([head, *rows]) + (
        '<p class="small"><b>Predicted gain</b>: share by which the slowest stage was to shrink. <b>Realised gain</b>: '
        "by how much its measured time did, against the static run's in the same batches (both do the same work in "
        f"turns), medians of up to {WINDOW} batches before and after, with its standard error. <b>By layer times</b>: "
        "the slowest stage against what it would have been with the boundaries of before, by the layer times of the "
        "batches after. <b>Had it stayed</b>: the static run's batches, times how the two runs compared before.</p>"
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


def _job(results: JobResults, source: str) -> str:
    settings = {key: value for key, value in results.settings.items() if value is not None}
    rows = [(key, _flat(value)) for key, value in settings.items()]
    rows.append(("environment", _flat(results.environment)))
    if source:
        rows.append(("read from", source))
    items = "".join(f"<dt>{escape(str(key))}</dt><dd>{escape(value)}</dd>" for key, value in rows)
    return f'<h2>The job</h2><dl class="small">{items}</dl>'


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = {key: f"{{{_flat(item)}}}" if isinstance(item, Mapping) else item for key, item in value.items()}
        return ", ".join(f"{key}: {item}" for key, item in inner.items())
    return str(value)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in rows[0])
    lines = []
    for row in rows[1:]:
        indented = ' class="indented"' if row[0].startswith(" ") else ""
        cells = [f"<td{indented}>{escape(row[0].strip())}</td>", *(f"<td>{escape(cell)}</td>" for cell in row[1:])]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _picture(figure: Figure, alt: str, caption: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return _image(buffer.getvalue(), alt, caption)


def _image(png: bytes, alt: str, caption: str) -> str:
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<figure><img src="data:image/png;base64,{data}" alt="{escape(alt)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _spaced(boundaries: Sequence[int] | None) -> str:
    return UNKNOWN if boundaries is None else spaced(boundaries)


def _number(value_s: float | None) -> str:
    return UNKNOWN if value_s is None else f"{value_s:.3f}"
