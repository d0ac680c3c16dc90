"""``dynpipe``: reads the command line, runs one command, returns its exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module

import dynpipe_ds
from dynpipe_ds._command_line import interrupts_raise
from dynpipe_ds.cli.command import OK, PROBLEMS, USAGE, Parser, ProblemError, UsageError

INTERRUPTED = 130  # what a shell reports for Ctrl-C

COMMANDS = {
    "demo": ("demo", "move layers between two processes of this machine, in a minute"),
    "doctor": ("doctor", "check this machine and a configuration"),
    "try": ("try_script", "run an existing script with and without moving layers"),
    "profile": ("profile", "measure the layers of a model on this device"),
    "plan": ("plan", "choose stage boundaries for a profile, and the order of forwards and backwards"),
    "simulate": ("simulate", "show one batch of a partition in time"),
    "run": ("run_script", "start a training on this machine, with spares"),
    "join": ("join", "let workers join a job that trains"),
    "watch": ("watch", "show a running job: its stages, losses, boundaries, moves and memory"),
    "report": ("report", "write a page on a run: losses, stages, layers, moves, and what other partitions would give"),
    "schema": ("schema", "print the JSON schema of the \"dynamic_pipeline\" section, for editors"),
}
"""Name of a command: its module in ``dynpipe_ds.cli``, and the first line of its help."""

COMPUTING = ("doctor", "profile")
"""Commands that need torch and DeepSpeed themselves. Importing both takes seconds, so the others do without."""

_MORE = """
See it work: demo. Before training: doctor (is this machine ready?), try (does my script keep its losses?), profile
(what do my layers cost?), plan (where to cut?), simulate (which stage waits?). Training: run (start with spares), join
(add workers), watch (follow the job), report (what happened?).
"""


def build_parser(wanted: str | None = None) -> Parser:
    """Build the parser of all commands.

    Args:
        wanted: the only command that will be parsed, so that no other one is imported; ``None``: any.
    """
    parser = Parser(
        prog="dynpipe", description=f"Dynamic pipeline parallelism for DeepSpeed.\n{_MORE}",
        epilog="'dynpipe COMMAND --help' has examples.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"dynpipe_ds {dynpipe_ds.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, (module, what) in COMMANDS.items():
        if wanted in (None, name):
            import_module(f"dynpipe_ds.cli.{module}").add_parser(commands)
        else:
            commands.add_parser(name, help=what)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of a command line, else of the process's own, and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    wanted = next((word for word in given if not word.startswith("-")), "")
    if wanted in COMPUTING:
        import_module("dynpipe_ds._public")
    parser = build_parser(wanted)
    parsed, unknown = parser.parse_known_args(given)
    if parsed.command is None:
        if unknown:
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        parser.print_help()
        return OK
    if unknown:
        parsed.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        interrupts_raise()
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
        print(f"\ndynpipe {parsed.command}: interrupted", file=sys.stderr)  # after the terminal's ^C
        return INTERRUPTED
