"""What a command is: its parser, its result, and its two kinds of errors."""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

OK = 0  # the command did what it was asked
PROBLEMS = 1  # it ran and found problems: a failed check, no partition that fits, a model that can't be run
USAGE = 2  # a wrong argument or a file that can't be used: nothing was computed
_CODES = "exit codes: 0 done, 1 problems found, 2 wrong usage"

Result = tuple[int, str, Mapping[str, Any]]
"""Exit code, the text for people, and the same as values for ``--json``."""


class UsageError(Exception):
    """An argument or a file that can't be used; one line with value, rule and remedy."""


class ProblemError(Exception):
    """The command was understood and the answer is that it can't be done; one line."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line each, and whose help ends in examples as they are typed."""

    def __init__(self, *, epilog: str = "", **options: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
            epilog=f"{epilog}\n\n{_CODES}", **options,
        )  # fmt: skip
        # May stand before a command as well as after it: without a default, what was given before is left alone.
        self.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the result as JSON")

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and leave with the code for wrong usage."""
        print(f"{self.prog}: error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(USAGE)

    def option(self, name: str, metavar: str, what: str, read: Callable[[str], Any] = str, **more: Any) -> None:
        """Add an option with a value; its help says the default."""
        default = more.get("default")
        if default is not None:
            what += f" (default {default if isinstance(default, str) else f'{default:g}'})"
        self.add_argument(name, metavar=metavar, help=what, type=read, **more)

    def flag(self, name: str, what: str, **more: Any) -> None:
        """Add an option without a value."""
        self.add_argument(name, action="store_true", help=what, **more)


def add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], Result]) -> Parser:
    """Add a command, whose help is the docstring of what runs it: one line, paragraphs, examples."""
    description, _, examples = inspect.cleandoc(run.__doc__ or "").partition("Examples:")
    what = description.partition("\n")[0].rstrip(".")
    parser: Parser = commands.add_parser(
        name, help=what[:1].lower() + what[1:], description=description.strip(), epilog=f"examples:{examples}"
    )
    parser.set_defaults(run=run, parser=parser)
    return parser


@contextmanager
def usage(where: str = "") -> Iterator[None]:
    """Turn what a block refuses (``ValueError``) into a :class:`UsageError` that begins with ``where``."""
    try:
        yield
    except ValueError as error:
        raise UsageError(where + "; ".join(listed_problems(error))) from error


@contextmanager
def users_code(failed: str, hint: str = "", *, show: bool = False) -> Iterator[None]:
    """Turn whatever a block raises into a :class:`ProblemError` that says what failed; or show it as it was raised."""
    try:
        yield
    except Exception as error:
        if show or isinstance(error, UsageError):
            raise
        raise ProblemError(f"{failed} {type(error).__name__}: {error}{hint}") from error


def listed_problems(error: ValueError) -> list[str]:
    """The problems of an error that lists them below a title, as the configuration's do; else its text, in one line."""
    lines = [line.strip() for line in str(error).splitlines()]
    listed = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    return listed or [" ".join(lines)]
