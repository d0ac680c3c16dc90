"""What the windows say: rates, speedups, share of the ideal. Pure: values in, values out."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.record import table
from benchmarks.scenarios.contenders import OURS, PARAMETERS, RUNS, UNIFORM
from benchmarks.scenarios.ideal import ideal_s, window_s
from scenarios.report.comparison import same_bits
from scenarios.report.interval import SAME_PARTITION, Estimate, ratio_of_totals


@dataclass(frozen=True)
class Spread:
    """A median with the least and the greatest of its values.

    Attributes:
        median: of the windows.
        least: the same.
        greatest: the same.
    """

    median: float
    least: float
    greatest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up some values."""
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True)
class Summary:
    """One scenario.

    Attributes:
        tokens_per_s: of each run, over the windows at the end.
        whole_tokens_per_s: of each run, over all timed windows.
        best_static: the static run with the greater throughput at the end.
        speedup: ours over it at the end, by windows; ``None`` where all layers lay as there.
        whole_speedup: ours over the best static of the whole run; the same.
        best_interval: the fixed interval with the greater throughput over the whole run; ``None`` if none ran.
        over_interval: ours over it, over the whole run; ``None`` also where all layers lay as there.
        ideal_tokens_per_s: of the best partition, at the end.
        share: of the ideal that ours reaches at the end, window by window, all overhead included.
        cut_share: what of it is left if only the cut counts: time of the ideal over that of ours' own cut, both on
            paper. The rest is what the engine adds (messages, own overhead), most of which static runs pay alike.
        whole_share: as share, over all timed windows, while the model changes and layers move.
        overhead: share of the whole run's time spent profiling, planning, migrating.
        ideal_boundaries: the best partition of the last window.
        equal_bits: whether all runs had the same losses in every batch, to the bit.
    """

    tokens_per_s: Mapping[str, Spread]
    whole_tokens_per_s: Mapping[str, float]
    best_static: str
    speedup: Estimate | None
    whole_speedup: Estimate | None
    best_interval: str | None
    over_interval: Estimate | None
    ideal_tokens_per_s: float
    share: Spread
    cut_share: Spread
    whole_share: float
    overhead: float
    ideal_boundaries: tuple[int, ...]
    equal_bits: bool


def summarise(values: Mapping[str, Any]) -> Summary:
    """Sum up what was measured in one scenario.

    Args:
        values: ``windows`` ([first, last + 1] of every timed window), ``settled`` (first batch of the end), ``runs``.
    """
    runs, windows = values["runs"], values["windows"]
    late = [i for i, (first, _) in enumerate(windows) if first >= values["settled"]]
    tokens = runs[OURS]["tokens_per_batch"]
    rates = {
        name: [tokens * (last - first) / s for (first, last), s in zip(windows, run["windows_s"], strict=True)]
        for name, run in runs.items()
    }
    whole = {name: tokens * _num_batches(windows) / sum(run["windows_s"]) for name, run in runs.items()}
    at_end = {name: Spread.of([rate[i] for i in late]) for name, rate in rates.items()}
    statics = [name for name in (UNIFORM, PARAMETERS) if name in runs]
    best = max(statics, key=lambda name: at_end[name].median)
    best_interval = max((name for name in runs if name not in RUNS), key=whole.__getitem__, default=None)
    ideals = [ideal(runs[OURS], window) for window in windows]
    ours_s = runs[OURS]["windows_s"]
    overhead_s = sum(runs[OURS][f"{what}_s"] for what in ("profiling", "planning", "migrating"))
    return Summary(
        tokens_per_s=at_end,
        whole_tokens_per_s=whole,
        best_static=best,
        speedup=speedup(runs[best], runs[OURS], windows, late),
        whole_speedup=speedup(
            runs[max(statics, key=lambda name: whole[name])], runs[OURS], windows, range(len(windows))
        ),
        best_interval=best_interval,
        over_interval=None if best_interval is None else speedup(
            runs[best_interval], runs[OURS], windows, range(len(windows))
        ),
        ideal_tokens_per_s=statistics.median(tokens * (windows[i][1] - windows[i][0]) / ideals[i][0] for i in late),
        share=Spread.of([ideals[i][0] / ours_s[i] for i in late]),
        cut_share=Spread.of([ideals[i][0] / _own_s(runs[OURS], windows[i]) for i in late]),
        whole_share=sum(seconds for seconds, _ in ideals) / sum(ours_s),
        overhead=overhead_s / sum(ours_s),
        ideal_boundaries=ideals[-1][1],
        equal_bits=all(same_bits(run["losses"], runs[OURS]["losses"]) for run in runs.values()),
    )


def speedup(
    static: Mapping[str, Any], ours: Mapping[str, Any], windows: Sequence[Sequence[int]], chosen: Sequence[int]
) -> Estimate | None:
    """How many times as fast ours was as a static run, by windows; ``None`` if both had the same partition throughout.

    Args:
        static: values of the static run.
        ours: of ours.
        windows: first batch, last batch + 1 of every timed window.
        chosen: indices of the windows that count.
    """
    cuts = ([run["boundaries"][slice(*windows[i])] for i in chosen] for run in (static, ours))
    if next(cuts) == next(cuts):
        return None
    return ratio_of_totals(*([run["windows_s"][i] for i in chosen] for run in (static, ours)))


def ideal(run: Mapping[str, Any], window: Sequence[int]) -> tuple[float, tuple[int, ...]]:
    """Least seconds of a window of a run, and the partition that would have reached them.

    Args:
        run: its values.
        window: first batch, last batch + 1.
    """
    batches = slice(*window)
    return ideal_s(
        run["micro_batches_s"][batches], run["steps_s"][batches], run["hooks_s"][batches], run["num_micro_batches"]
    )


def _own_s(run: Mapping[str, Any], window: Sequence[int]) -> float:
    """Seconds of a window on paper with the boundaries that the run had."""
    batches = slice(*window)
    return window_s(
        run["micro_batches_s"][batches], run["boundaries"][batches], run["steps_s"][batches], run["hooks_s"][batches],
        run["num_micro_batches"],
    )


def _num_batches(windows: Sequence[Sequence[int]]) -> int:
    return sum(last - first for first, last in windows)


HEAD = (
    "scenario", "static uniform, tokens/s", "static parameters", "ours", "ideal",
    "ours / best static (95% interval)", "ours / ideal (least to greatest)",
    "of which the cut", "whole run: ours / best static (95% interval)", "whole run: ours / ideal",
    "whole run: ours / best interval (95% interval)", "own overhead", "losses",
)


def told(found: Estimate | None) -> str:
    """A speedup with its interval, or what is told in its place."""
    return SAME_PARTITION if found is None else found.text()


def row(name: str, values: Mapping[str, Any]) -> list[str]:
    """A scenario's line of the table, under :data:`HEAD`."""
    s = summarise(values)

    def rate(run: str) -> str:
        return f"{s.tokens_per_s[run].median:,.0f}" if run in s.tokens_per_s else "the same cut"

    return [
        name, rate(UNIFORM), rate(PARAMETERS), rate(OURS), f"{s.ideal_tokens_per_s:,.0f}",
        told(s.speedup),
        f"{s.share.median:.1%} ({s.share.least:.1%} to {s.share.greatest:.1%})",
        f"{s.cut_share.median:.1%}", told(s.whole_speedup), f"{s.whole_share:.1%}",
        f"{told(s.over_interval)} ({s.best_interval})" if s.best_interval else "not run", f"{s.overhead:.2%}",
        "equal bits" if s.equal_bits else "DIFFER",
    ]


def text(all_values: Mapping[str, Mapping[str, Any]]) -> str:
    """The table of all scenarios, and what its columns are.

    Args:
        all_values: by scenario.
    """
    first = next(iter(all_values.values()))
    late = [window for window in first["windows"] if window[0] >= first["settled"]]
    words = (
        f"Two stages of one thread, {first['num_batches']} batches each run, in turns of {late[0][1] - late[0][0]}. "
        f"Medians of the last {len(late)} windows, when the model has changed; *whole run* includes changing, "
        "deciding and moving. *Ours / best static* is of those windows' seconds together; its interval takes each "
        "window as one pair. *Ideal*: the partition that is best for the layer times as measured in the very "
        "window, micro-batch by micro-batch, chosen with hindsight, with the schedule's fill and drain, without any "
        "overhead. *Of which the cut*: the same if only our choice of boundaries counts, on paper; the rest are "
        "messages and overhead. *Best interval*: of the runs that decide after every so-many-th batch (in brackets), "
        "the fastest as a whole, chosen with hindsight."
    )
    return f"{words}\n\n{table(HEAD, [row(name, values) for name, values in all_values.items()])}"
