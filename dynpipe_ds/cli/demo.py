"""``dynpipe demo``: layers that move between two processes of this machine, within a minute."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from dynpipe_ds.cli import pair
from dynpipe_ds.cli.command import OK, PROBLEMS, ProblemError, Result, UsageError, add_command
from dynpipe_ds.cli.demonstration.course import EVENTS
from dynpipe_ds.cli.demonstration.outcome import Event, line, text_of, values_of
from dynpipe_ds.cli.running import Processes, leaving_in_order
from dynpipe_ds.ports import reserved_port

COMMAND = (sys.executable, "-m", "dynpipe_ds.cli.demonstration.rank")
DEFAULT_FOLDER = "dynpipe-demo"


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "demo", run)
    parser.option("--folder", "DIR", f"empty or new (default {DEFAULT_FOLDER}, else {DEFAULT_FOLDER}-2, …)")


def run(arguments: argparse.Namespace) -> Result:
    """Move layers between two processes of this machine, in a minute.

    Trains a small GPT with DeepSpeed on two CPU processes, in two runs that take turns. In one run the stages stay, in
    the other they may move. Before batch 8 the front half of the layers freezes. The second stage is then slower, and
    layers move to the first. Shows boundaries and seconds per batch. Compares all losses, weights and optimizer state
    bit for bit. Needs no GPU, no network and no compiler. Exit code 0: layers moved and every bit is equal.

    Examples:
      dynpipe demo
      dynpipe demo --folder shown --json
    """
    folder = _folder(arguments.folder)
    told = _Teller(folder / EVENTS)
    with leaving_in_order(), reserved_port() as port, Processes(folder) as processes:
        print(f"output: {folder}", file=sys.stderr, flush=True)
        pair.start(processes, folder, [*COMMAND, str(folder)], port)
        failure = pair.wait(processes, folder, look=told.look)
    if failure:
        raise ProblemError(f"{failure}; 'dynpipe doctor' looks for the cause, the logs are in {folder}")
    values = values_of(told.events)
    (folder / "demo.json").write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return (OK if values["good"] else PROBLEMS), text_of(values, str(folder)), values


class _Teller:
    """Follows the events of a run, and says each that is worth a line on stderr."""

    def __init__(self, file: Path) -> None:
        self.events: list[Event] = []
        self._file = file
        self._read = 0

    def look(self) -> None:
        """Read what has been written since the last time."""
        if not self._file.exists():
            return
        with self._file.open("rb") as opened:
            opened.seek(self._read)
            lines = opened.read()
        whole = lines[: lines.rfind(b"\n") + 1]
        self._read += len(whole)
        for text in whole.splitlines():
            event = json.loads(text)
            self.events.append(event)
            said = line(event)
            if said is not None:
                print(said, file=sys.stderr, flush=True)


def _folder(given: str | None) -> Path:
    """A folder of the run's own."""
    if given is not None:
        folder = Path(given).absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UsageError(f"--folder {given}: must be an empty folder or not there yet; name another one")
    else:
        number = 1
        while (folder := Path(DEFAULT_FOLDER + (f"-{number}" if number > 1 else "")).absolute()).exists():
            number += 1
    folder.mkdir(parents=True, exist_ok=True)
    return folder
