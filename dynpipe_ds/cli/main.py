"""``dynpipe``: reads the command line, runs one command, returns its exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

import dynpipe_ds
from dynpipe_ds.cli import doctor, join, plan, profile, run_script, simulate, try_script
from dynpipe_ds.cli.command import PROBLEMS, USAGE, Parser, ProblemError, UsageError

INTERRUPTED = 130  # what a shell reports for Ctrl-C

_MORE = """
Typical order: doctor (is this machine ready?), try (does my script keep its losses?), profile (what do my layers
cost?), plan (where to cut?), simulate (who waits for whom?), then train: run starts a training with spares, join adds
processes to one.
"""


def build_parser() -> Parser:
    """Build the parser of all commands."""
    parser = Parser(
        prog="dynpipe", description=f"Dynamic pipeline parallelism for DeepSpeed.\n{_MORE}",
        epilog="'dynpipe COMMAND --help' has examples.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"dynpipe_ds {dynpipe_ds.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)
    for command in (doctor, try_script, profile, plan, simulate, run_script, join):
        command.add_parser(commands)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of a command line, else of the process's own, and return its exit code."""
    parsed, unknown = build_parser().parse_known_args(arguments)
    if unknown:
        parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code, text, values = parsed.run(parsed)
        print(json.dumps(values, indent=1, allow_nan=False) if "json" in parsed else text)
        return int(code)
    except BrokenPipeError:  # as in `dynpipe plan … | head`: the reader has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PROBLEMS
    except (UsageError, ProblemError, OSError) as error:
        print(f"dynpipe {parsed.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return PROBLEMS if isinstance(error, ProblemError) else USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
