"""Does `auto` ever lose? Whole runs on paper: static cuts, fixed intervals, `auto`; short runs and long.

    python -m benchmarks.planner.regret                       # 60 batches, 2 to 24 stages
    python -m benchmarks.planner.regret --batches 1000
    python -m benchmarks.planner.regret --halves

Batches are simulated; profiles, trials, decisions, orders and what all of it costs are the engine's own
(``benchmarks/replay/predict.py``, which agrees with the engine in virtual time). Every contender runs 1F1B, and then
every one plans orders.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import geometric_mean, median

from benchmarks.paper.experiments import LAYER_MS, SCENARIOS, scenario_of
from benchmarks.paper.report import Report
from benchmarks.record import table
from benchmarks.replay.case import OURS, STATIC, Case, Result, first_boundaries
from benchmarks.replay.predict import predict
from benchmarks.schedules.on_paper import MESSAGES, TOGETHER, on_paper
from benchmarks.schedules.replayed import HALVES, SIZES

INTERVALS = (1, 4, 16)
STATICS = tuple(method.label for method in STATIC)
FIXED, AUTO = OURS[0].label, OURS[1].label
LEAST, SHARE = 0.99, 0.97
"""Of the throughput of the best contender, and of its gain over the best static run, what `auto` is to reach."""
MOST_WITH_HINDSIGHT = 60
"""Batches of a run that are planned with hindsight at most; in longer ones they stand for those between them."""
GAIN = 1.01
"""Over the best static run, from which on a share of the gain is more than rounding."""


@dataclass(frozen=True)
class Row:
    """One load model on one pipeline, and all that ran it.

    Args:
        case: what all of them have in common.
        plans_orders: whether all plan orders; else all run 1F1B.
        static: the better one.
        intervals: one for each of :data:`INTERVALS`.
        auto: ours.
        ideal_s: seconds with the best cut and order for every batch, with hindsight and for nothing.
    """

    case: Case
    plans_orders: bool
    static: Result
    intervals: tuple[Result, ...]
    auto: Result
    ideal_s: float

    @property
    def fixed(self) -> Result:
        """The best interval."""
        return min(self.intervals, key=_seconds)

    @property
    def over_static(self) -> float:
        """Throughput of `auto` over that of the best static run."""
        return self.static.wall_s / self.auto.wall_s

    @property
    def over_fixed(self) -> float:
        """The same over that of the best fixed interval."""
        return self.fixed.wall_s / self.auto.wall_s

    @property
    def share(self) -> float | None:
        """Of the best interval's gain over the best static run, what `auto` has; ``None`` where there is none."""
        gain = self.static.wall_s / self.fixed.wall_s
        return None if gain < GAIN else (self.over_static - 1) / (gain - 1)

    @property
    def regret(self) -> float:
        """What `auto` takes longer than with hindsight."""
        return self.auto.wall_s / self.ideal_s - 1

    @property
    def holds(self) -> bool:
        """Whether `auto` is as good as it is to be."""
        return min(self.over_static, self.over_fixed) >= LEAST and (self.share is None or self.share >= SHARE)


def cases(
    stages: Sequence[int], batches: int, scenarios: Sequence[str], *, halves: bool, jitter: float
) -> Iterator[Case]:
    """What to run.

    Args:
        stages: numbers of stages.
        batches: of a run.
        scenarios: load models.
        halves: whether attention and MLP of a block are two layers.
        jitter: of layers from one micro-batch to the next, relative.
    """
    for num_stages in stages:
        count, blocks = SIZES[num_stages]
        for name in scenarios:
            trace = f"model:{name}:{blocks}{HALVES if halves else ''}"
            yield Case(trace, AUTO, num_stages, count, batches, LAYER_MS, jitter=jitter)


def measure(case: Case, *, plans_orders: bool) -> Row:
    """Run all contenders.

    Args:
        case: what they have in common.
        plans_orders: whether all plan orders.
    """
    def run(label: str, every: int = 1) -> Result:
        if plans_orders:
            label += ", auto order"
        return predict(replace(case, method=label, every=every))

    starts = [tuple(first_boundaries(method, case.load_trace(), case.num_stages)) for method in STATIC]
    statics = [label for i, label in enumerate(STATICS) if starts.index(starts[i]) == i]  # equal runs are run once
    hindsight = TOGETHER if plans_orders else MESSAGES
    return Row(
        case, plans_orders, min(map(run, statics), key=_seconds),
        tuple(run(FIXED, every) for every in INTERVALS), run(AUTO),
        on_paper(case, (hindsight,), most_batches=MOST_WITH_HINDSIGHT)[hindsight].seconds,
    )


def _seconds(result: Result) -> float:
    return result.wall_s


def _measure(job: tuple[Case, bool]) -> Row:
    return measure(job[0], plans_orders=job[1])


def text_of(rows: Sequence[Row]) -> str:
    """The table.

    Args:
        rows: what was measured.
    """
    head = ["orders", "stages", "load model", "best static", "best interval", "over static", "`auto` over static",
            "over the interval", "share of its gain", "moves", "over hindsight", ""]  # fmt: skip
    lines = [
        [
            "planned" if row.plans_orders else "1F1B", str(row.case.num_stages), scenario_of(row.case.trace),
            row.static.case.method.split()[1].rstrip(","), str(row.fixed.case.every),
            f"{row.static.wall_s / row.fixed.wall_s:.3f}", f"{row.over_static:.3f}", f"{row.over_fixed:.3f}",
            "" if row.share is None else f"{row.share:.0%}", str(len(row.auto.moves)), f"+{row.regret:.1%}",
            "" if row.holds else "**below**",
        ]
        for row in rows
    ]  # fmt: skip
    return table(head, lines)


def notes(rows: Sequence[Row]) -> list[str]:
    """What the table comes to.

    Args:
        rows: what was measured.
    """
    below = [row for row in rows if not row.holds]
    shares = [row.share for row in rows if row.share is not None]
    planning = max(row.auto.planning_s / row.auto.wall_s for row in rows)
    over = {every: [row.intervals[i].wall_s / row.auto.wall_s for row in rows] for i, every in enumerate(INTERVALS)}
    return [
        f"`auto` reaches {LEAST} of the best static run and of the best interval, and {SHARE:.0%} of that interval's "
        f"gain, in {len(rows) - len(below)} of {len(rows)} rows.",
        f"Over the best static run: median {median(row.over_static for row in rows):.3f}, least "
        f"{min(row.over_static for row in rows):.3f}. Over the best interval: median "
        f"{median(row.over_fixed for row in rows):.3f}, least {min(row.over_fixed for row in rows):.3f}. Share of its "
        f"gain: median {median(shares):.0%}, least {min(shares):.0%}." if shares else "No interval gains anything.",
        "Of three intervals the best one in a row is so by chance, too. Over one interval for all rows: " + "; ".join(
            f"every {every}: mean {geometric_mean(ratios):.3f}, {min(ratios):.3f} to {max(ratios):.3f}"
            for every, ratios in over.items()
        ) + ".",
        f"Deciding and planning take at most {planning:.2%} of a run.",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=sorted(SIZES), choices=sorted(SIZES))
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--halves", action="store_true")
    parser.add_argument("--jitter", type=float, default=0.0)
    parser.add_argument("--orders", nargs="+", choices=("1f1b", "planned"), default=["1f1b", "planned"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/schedules"))
    options = parser.parse_args()
    wanted = cases(options.stages, options.batches, options.scenarios, halves=options.halves, jitter=options.jitter)
    jobs = [(case, orders == "planned") for case in wanted for orders in options.orders]
    some = "" if options.stages == sorted(SIZES) else "_of_" + "_".join(map(str, options.stages))
    name = f"regret_{options.batches}{some}{'_halves' if options.halves else ''}{'_jitter' if options.jitter else ''}"
    report = Report(name, options.out, "simulation", False, "`auto` against static cuts and fixed intervals")
    rows: list[Row] = []
    with get_context("forkserver").Pool(options.processes) as pool:
        for row in pool.imap(_measure, jobs):
            rows.append(row)
            print(f"{len(rows)}/{len(jobs)} {row.case.trace} {row.case.num_stages} stages: over static "
                  f"{row.over_static:.3f}, over interval {row.over_fixed:.3f}", flush=True)  # fmt: skip
            save(report, sorted(rows, key=lambda row: (not row.plans_orders, row.case.num_stages)))  # long runs may end


def save(report: Report, rows: Sequence[Row]) -> None:
    """Write the table and its numbers.

    Args:
        report: where to.
        rows: what was measured so far.
    """
    report.text = (
        f"Runs of {rows[0].case.num_batches} batches. *Best static* and *best interval* (every {INTERVALS[0]}, "
        f"{INTERVALS[1]} or {INTERVALS[2]} batches) are chosen with hindsight; *over hindsight*: what `auto` takes "
        "longer than the best cut and order for every batch, for nothing (of longer runs at most "
        f"{MOST_WITH_HINDSIGHT} batches, at equal distances). Profiles, decisions, planned orders and moves are "
        "charged."
    )
    report.table = text_of(rows)
    report.values = [
        {
            "case": asdict(row.case), "plans_orders": row.plans_orders, "over_static": row.over_static,
            "over_fixed": row.over_fixed, "share": row.share, "regret": row.regret, "holds": row.holds,
            "over_each_interval": [each.wall_s / row.auto.wall_s for each in row.intervals],
            "best_static": row.static.case.method, "best_interval": row.fixed.case.every,
            "moves": [asdict(move) for move in row.auto.moves],
        }
        for row in rows
    ]  # fmt: skip
    report.notes = notes(rows)
    report.save()


if __name__ == "__main__":
    main()
