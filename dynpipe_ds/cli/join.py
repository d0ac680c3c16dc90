"""``dynpipe join``: workers for a job that trains."""

from __future__ import annotations

import argparse
import signal
from typing import Any

from dynpipe_ds.cli import reading
from dynpipe_ds.cli.command import OK, ProblemError, Result, UsageError, add_command, usage
from dynpipe_ds.cli.launching import Launched, newcomer_environment
from dynpipe_ds.cli.running import leaving_in_order
from dynpipe_ds.joining.address import find_door

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""Signals by which schedulers warn. With ``repack.leave_on`` workers leave in order, however long that takes."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "join", run)
    parser.option("--workers", "N", "how many workers to start", reading.whole(1), default=1)
    parser.option("--first-device", "D", "device of the first worker (LOCAL_RANK)", reading.whole(0), default=0)
    parser.add_argument("address", metavar="ADDRESS", help="HOST:PORT from the job's log, or the job's door file")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- SCRIPT", help="script and arguments")


def run(arguments: argparse.Namespace) -> Result:
    """Let workers join a job that trains.

    Give the job's own script and arguments. Each worker runs the script without layers, shows that it fits the job,
    and waits until the pipeline becomes longer. A worker that does not fit is refused, with every difference. The door
    file, or the token in DYNPIPE_TOKEN, gives the right to join. SIGTERM, SIGUSR1 and SIGUSR2 are passed on to the
    workers. Options come before the address.

    Examples:
      dynpipe join run/door.json -- train.py --deepspeed_config ds_config.json
      dynpipe join --workers 2 10.0.0.7:29600 -- train.py
    """
    given = list(arguments.command_line)
    if given[:1] == ["--workers"] or given[:1] == ["--first-device"]:
        raise UsageError(f"{given[0]} stands after the address; give options before it")
    command = given[given[:1] == ["--"] :]
    if not command:
        raise UsageError("there is no script to run; give the job's own after --")
    with usage():
        find_door(arguments.address)
    launched = Launched(command, survivors_stay=True)
    with leaving_in_order(), launched.passing_on(*WARNINGS):
        for i in range(arguments.workers):
            launched.start(f"j{i}", newcomer_environment(arguments.address, arguments.first_device + i))
        code = launched.wait()
    if code:
        raise ProblemError(f"joining failed with exit code {code}; what was printed says why")
    return OK, "these workers have ended", {"exit_code": code}
