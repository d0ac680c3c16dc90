"""``dynpipe watch``: a running job on the terminal, from the journal that it writes."""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from dynpipe_ds.cli import reading
from dynpipe_ds.cli.command import OK, ProblemError, Result, add_command, usage
from dynpipe_ds.journal import Journal
from dynpipe_ds.journal.standing import standing

if TYPE_CHECKING:
    from rich.console import Console

_EVERY_S = 1.0


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "watch", run)
    reading.add_journal(parser)
    every = reading.at_least_0("seconds, such as 1")
    parser.option("--every", "SECONDS", "seconds between two looks", every, default=_EVERY_S)
    parser.flag("--once", "show the present state and end (always, if the output is not a terminal)")


def run(arguments: argparse.Namespace) -> Result:
    """Show a running job: its stages, losses, boundaries, moves and memory.

    Reads the journal of a run. The first rank writes one if the "dynamic_pipeline" section has the key "journal". Runs
    of scenarios.train have one in their output folder. The stage that computes longest is shown as the one that
    limits. If a folder has several runs, one whose layers may move is shown. Ctrl-C ends the view, not the job.
    Needs the extra "watch" (rich), except for --json.

    Examples:
      dynpipe watch runs/first
      dynpipe watch outputs/freezing --run static --once
      dynpipe watch runs/first --json
    """
    wants_values = "json" in arguments
    if not wants_values and importlib.util.find_spec("rich") is None:
        raise ProblemError("the live view needs rich: pip install 'dynpipe_ds[watch]', or give --json")
    if wants_values or arguments.once or not sys.stdout.isatty():
        with usage():
            journal, others = reading.journal(arguments)
        return OK, "" if wants_values else _snapshot(journal, others), standing(journal)
    journal = _live(arguments)
    return OK, f"{journal.file}: {len(journal.batches)} batches", {}


def _snapshot(journal: Journal, others: Iterable[str]) -> str:
    from rich.console import Console

    from dynpipe_ds.journal.view import RunView

    console = Console()
    with console.capture() as captured:
        console.print(RunView(journal, list(others)))
    return captured.get().rstrip("\n")


def _live(arguments: argparse.Namespace) -> Journal:
    """Show it until Ctrl-C; returns what was shown last."""
    from rich.console import Console

    console = Console()
    journal = None
    try:
        journal, others = _await(arguments, console)
        _follow(journal, others, console, lambda: time.sleep(arguments.every))
    except KeyboardInterrupt:
        if journal is None:
            raise
    assert journal is not None
    return journal


def _await(arguments: argparse.Namespace, console: Console) -> tuple[Journal, list[str]]:
    """The run, as soon as there is one: a job writes its first line when its engine is made."""
    try:
        return reading.journal(arguments)
    except ValueError as error:
        with console.status(f"waiting: {error}"):
            while True:
                time.sleep(arguments.every)
                try:
                    return reading.journal(arguments)
                except ValueError:
                    continue


def _follow(journal: Journal, others: list[str], console: Console, wait: Callable[[], object]) -> None:
    from rich.live import Live

    from dynpipe_ds.journal.view import RunView

    view = RunView(journal, others)
    with Live(view, console=console, auto_refresh=False, screen=True) as live:
        while True:
            journal.update()
            live.update(view, refresh=True)
            wait()
