"""``dynpipe run``: a training on this machine, with spares that may join it."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from dynpipe_ds.cli import reading
from dynpipe_ds.cli.command import OK, ProblemError, Result, UsageError, add_command
from dynpipe_ds.cli.launching import Launched, newcomer_environment, rank_environment
from dynpipe_ds.cli.running import leaving_in_order
from dynpipe_ds.joining.address import DOOR_FILE
from dynpipe_ds.ports import reserved_port


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "run", run)
    parser.option("--workers", "N", "ranks that train from the start", reading.whole(1), default=1)
    parser.option("--spares", "K", "processes that wait to join", reading.whole(0), default=0)
    parser.flag("--survivors-stay", "when a process fails, leave the others running")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- SCRIPT", help="script and arguments")


def run(arguments: argparse.Namespace) -> Result:
    """Start a training on this machine, with spares.

    Starts the ranks of a script, and spares. A spare runs the same script and waits until the pipeline becomes longer:
    by engine.repack(n), or by the job's own decision. More workers can come later with dynpipe join. Every line of
    output begins with the rank that its process began with; spares are s0, s1 and so on.

    Examples:
      dynpipe run --workers 2 --spares 2 -- train.py --deepspeed_config ds_config.json
      dynpipe run --workers 4 --spares 1 --survivors-stay -- train.py
    """
    command = arguments.command_line[arguments.command_line[:1] == ["--"] :]
    if not command:
        raise UsageError("there is no script to run; give it after --")
    with leaving_in_order(), reserved_port() as port, tempfile.TemporaryDirectory(prefix="dynpipe-run-") as folder:
        door = str(Path(folder) / "door.json")
        launched = Launched(command, survivors_stay=arguments.survivors_stay)
        for rank in range(arguments.workers):
            environment = rank_environment(rank, arguments.workers, port)
            launched.start(str(rank), {**environment, DOOR_FILE: door})
        for spare in range(arguments.spares):
            launched.start(f"s{spare}", newcomer_environment(door, arguments.workers + spare))
        code = launched.wait()
    if code:
        raise ProblemError(f"the training failed with exit code {code}; what it printed says why")
    return OK, "the training has ended", {"exit_code": code}
