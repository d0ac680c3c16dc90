"""``dynpipe report``: one HTML page on a finished job."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynpipe_ds.cli.command import OK, Result, UsageError, add_command, brackets, percent
from dynpipe_ds.reporting.run_results import JobResults, Rebalance, load_results
from dynpipe_ds.reporting.table import UNKNOWN, comparison_table

_MORE = """
RUN is the output folder of scenarios.train (it holds results.json). The page needs no other file: throughput, layer
costs over training with the stage boundaries, stage times and a simulated timeline before and after, and every
re-partition with its predicted and realised gain.
"""
_EXAMPLES = """
dynpipe report outputs/freezing
dynpipe report outputs/freezing --output freezing.html --json
"""


def add_parser(commands: Any) -> None:
    """Add the command.

    Args:
        commands: what ``add_subparsers`` returned.
    """
    parser = add_command(
        commands, "report", run, what="write an HTML page on a finished job", more=_MORE, examples=_EXAMPLES
    )
    parser.add_argument("run_folder", metavar="RUN", help="output folder of the training entry")
    parser.add_argument("--output", metavar="FILE", help="(default report.html in RUN)")


def run(arguments: argparse.Namespace) -> Result:
    """Carry out the command.

    Args:
        arguments: as parsed.

    Raises:
        UsageError: when the folder holds no results.
    """
    try:
        results = load_results(arguments.run_folder)
    except ValueError as error:
        raise UsageError(str(error)) from error
    from dynpipe_ds.reporting.html import OLD_FOLDER, save_report  # draws

    folder = Path(arguments.run_folder)
    default = (folder if folder.is_dir() else folder.parent) / "report.html"
    page = save_report(arguments.output or default, results, source=str(arguments.run_folder))
    notes = [] if results.has_recording else [OLD_FOLDER]
    return OK, _text(results, page, notes), _values(results, page, notes)


def _values(results: JobResults, page: Path, notes: list[str]) -> dict[str, Any]:
    static, dynamic = results.static.summary, results.dynamic.summary
    return {
        "page": str(page), "notes": notes,
        "static_tokens_per_s": static.tokens_per_s, "dynamic_tokens_per_s": dynamic.tokens_per_s,
        "static_bubble_ratio": static.bubble_ratio, "dynamic_bubble_ratio": dynamic.bubble_ratio,
        "rebalances": [asdict(rebalance) for rebalance in results.dynamic.rebalances],
    }  # fmt: skip


def _text(results: JobResults, page: Path, notes: list[str]) -> str:
    lines = [comparison_table(results.static.summary, results.dynamic.summary), ""]
    lines += [_line(rebalance) for rebalance in results.dynamic.rebalances]
    lines += [f"note: {note}" for note in notes]
    return "\n".join([*lines, f"written: {page}"])


def _line(rebalance: Rebalance) -> str:
    cuts = [UNKNOWN if cut is None else brackets(cut) for cut in (rebalance.before, rebalance.after)]
    gains = [
        UNKNOWN if gain is None else percent(gain)
        for gain in (rebalance.predicted_gain, rebalance.realised_gain, rebalance.same_work_gain)
    ]
    if rebalance.realised_noise is not None:
        gains[1] += f" ± {percent(rebalance.realised_noise)}"
    return (
        f"re-partition after batch {rebalance.batch}: {' -> '.join(cuts)}, gain {gains[0]} predicted, {gains[1]} "
        f"realised, {gains[2]} by layer times"
    )
