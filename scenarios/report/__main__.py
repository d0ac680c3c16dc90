"""Write one HTML page on a finished job of ``scenarios.train``.

    python -m scenarios.report outputs/freezing
    python -m scenarios.report outputs/freezing --output freezing.html --json
    python -m scenarios.report outputs/freezing --trace freezing.json

The page needs no other file: throughput, layer costs over training with the stage boundaries, stage times before and
after, a measured batch of each run in time, which order ran when, and every re-partition with its predicted and
realised gain.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from dynpipe_ds.reporting import save_chrome_trace
from dynpipe_ds.simulation import Interval
from scenarios.report.comparison import UNKNOWN, comparison_table, same_partition, share, spaced, speedup
from scenarios.report.results import JobResults, Rebalance, load_results


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and say what is on it.

    Args:
        arguments: the command line without the program's name; ``None``: the process's own.

    Returns:
        The exit code: 0 done, 2 wrong usage, which is one line on stderr.
    """
    parser = argparse.ArgumentParser(
        "python -m scenarios.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("folder", type=Path, help="output folder of scenarios.train (it holds results.json)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="(default report.html in the folder)")
    trace = "write the measured batches as a Chrome trace; open it at https://ui.perfetto.dev"
    parser.add_argument("--trace", type=Path, metavar="FILE", help=trace)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    try:
        results = load_results(options.folder)
        from scenarios.report.page import notes, save_report, timelines  # draws

        default = (options.folder if options.folder.is_dir() else options.folder.parent) / "report.html"
        if options.trace is not None:
            save_chrome_trace(options.trace, _some(timelines(results), options.folder))
        page = save_report(options.output or default, results, source=str(options.folder))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    told = notes(results)
    values = _values(results, page, told)
    print(json.dumps(values, indent=1, allow_nan=False) if options.json else _text(results, page, told))
    return 0


def _some(timelines: dict[str, tuple[Interval, ...]], folder: Path) -> dict[str, tuple[Interval, ...]]:
    if not timelines:
        raise ValueError(f"{folder}: these results have no measured batch to write as a trace; train again")
    return timelines


def _values(results: JobResults, page: Path, notes: list[str]) -> dict[str, Any]:
    static, dynamic = results.static.summary, results.dynamic.summary
    found = speedup(static, dynamic)
    return {
        "page": str(page), "notes": notes, "same_partition": same_partition(static, dynamic),
        "speedup": found and found.value, "speedup_interval": found and [found.low, found.high],
        "static_tokens_per_s": static.tokens_per_s, "dynamic_tokens_per_s": dynamic.tokens_per_s,
        "static_bubble_ratio": static.bubble_ratio, "dynamic_bubble_ratio": dynamic.bubble_ratio,
        "rebalances": [asdict(rebalance) for rebalance in results.dynamic.rebalances],
        "orders": results.dynamic.recording.orders if results.dynamic.recording else [],
    }  # fmt: skip


def _text(results: JobResults, page: Path, notes: list[str]) -> str:
    lines = [f"note: {note}" for note in notes]
    lines += [comparison_table(results.static.summary, results.dynamic.summary), ""]
    lines += [_line(rebalance) for rebalance in results.dynamic.rebalances]
    recording = results.dynamic.recording
    lines += [_order_line(phase) for phase in recording.orders] if recording is not None else []
    return "\n".join([*lines, f"written: {page}"])


def _line(rebalance: Rebalance) -> str:
    before, after = (UNKNOWN if b is None else spaced(b) for b in (rebalance.before, rebalance.after))
    realised = share(rebalance.realised_gain, rebalance.realised_noise)
    return (
        f"re-partition after batch {rebalance.batch}: {before} -> {after}, gain {share(rebalance.predicted_gain)} "
        f"predicted, {realised} realised, {share(rebalance.same_work_gain)} by layer times"
    )


def _order_line(phase: Mapping[str, Any]) -> str:
    times = ""
    if phase["predicted_s"]:
        predicted_s, measured_s = (median(phase[key]) for key in ("predicted_s", "measured_s"))
        times = f", a batch {predicted_s:.4f} s predicted, {measured_s:.4f} s measured"
    return f"order from batch {phase['first_batch']}: {phase['order']} on {spaced(phase['boundaries'])}{times}"


if __name__ == "__main__":
    sys.exit(main())
