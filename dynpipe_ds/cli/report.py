"""``dynpipe report``: a page on a run, finished or not, from its journal."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dynpipe_ds.cli import reading
from dynpipe_ds.cli.command import OK, Result, add_command, usage
from dynpipe_ds.journal.standing import standing


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "report", run)
    reading.add_journal(parser)
    parser.option("--output", "FILE", "page to write (default: report.html beside the journal)")


def run(arguments: argparse.Namespace) -> Result:
    """Write a page on a run: losses, stages, layers, moves, and what other partitions would give.

    Reads the journal of a run, also while it trains. The first rank writes one if the "dynamic_pipeline" section has
    the key "journal". The page is one HTML file that needs no other. It predicts the batch on other partitions and in
    other orders from the newest layer times. If a folder has several runs, one whose layers may move is taken. To
    compare both runs of a job of scenarios.train, use python -m scenarios.report.

    Examples:
      dynpipe report runs/first
      dynpipe report outputs/freezing --run static --output static.html
      dynpipe report runs/first --json
    """
    from dynpipe_ds.reporting.run_page import run_page  # draws

    with usage():
        journal, _ = reading.journal(arguments)
        if journal.is_empty:
            raise ValueError(f"{journal.file}: tells of no batch that this version can read; let the job train one")
    page = run_page(journal).save(arguments.output or journal.file.with_name("report.html"))
    return OK, f"written: {page}", {"page": str(Path(page)), **standing(journal)}
