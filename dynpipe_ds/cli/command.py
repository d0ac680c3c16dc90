"""What all commands share: reading arguments and files, saying what is wrong, showing values."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition import check_boundaries
from dynpipe_ds.sections import parse_bytes

OK = 0
"""The command did what it was asked."""

PROBLEMS = 1
"""The command ran and found problems: a failed check, no partition that fits, a model that can't be run."""

USAGE = 2
"""A wrong argument or a file that can't be used: nothing was computed."""

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


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], Result], *, what: str, more: str, examples: str
) -> Parser:
    """Add a command and return its parser.

    Args:
        commands: what ``add_subparsers`` returned.
        name: of the command.
        run: carries it out.
        what: one line on it.
        more: a paragraph on it.
        examples: command lines, one below the other.
    """
    lines = "\n".join(f"  {line}" for line in examples.strip().splitlines())
    description = f"{what[0].upper()}{what[1:]}.\n\n{more.strip()}"
    parser: Parser = commands.add_parser(name, help=what, description=description, epilog=f"examples:\n{lines}")
    parser.set_defaults(run=run, parser=parser)
    return parser


# -- what is wrong -------------------------------------------------------------------


@contextmanager
def usage(where: str = "") -> Iterator[None]:
    """Turn what a block refuses (``ValueError``) into a :class:`UsageError`.

    Args:
        where: written before it, such as a file's name.
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(where + "; ".join(listed_problems(error))) from error


@contextmanager
def users_code(failed: str, hint: str = "", *, show: bool = False) -> Iterator[None]:
    """Turn whatever a block raises into a :class:`ProblemError`.

    Args:
        failed: written before it.
        hint: written after it.
        show: raise it as it is instead.
    """
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


# -- files and modules ---------------------------------------------------------------


def load_profile(path: str, num_micro_batches: int | None = None) -> PipelineProfile:
    """Read a profile file.

    Args:
        path: of the JSON file.
        num_micro_batches: M to use instead of the profile's own.

    Raises:
        UsageError: when there is no such file or it is no profile.
    """
    try:
        profile = PipelineProfile.load(path)
    except (ValueError, OSError) as error:
        wrong = f"{path}: no such file" if isinstance(error, FileNotFoundError) else error
        raise UsageError(f"{wrong}; write one with 'dynpipe profile' or engine.profile.save(path)") from error
    return profile if num_micro_batches is None else replace(profile, num_micro_batches=num_micro_batches)


def load_json(path: str, what: str = "a DeepSpeed JSON") -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: of the file.
        what: it should hold, for the message.

    Raises:
        UsageError: when there is no such file or it holds something else.
    """
    remedy = f"give the path of {what}"
    if not Path(path).is_file():
        raise UsageError(f"{path}: no such file; {remedy}")
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: not valid JSON ({error}); {remedy}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds a JSON {type(values).__name__}, not an object; {remedy}")
    return values


def partition_of(text: str, num_layers: int, num_stages: int | None = None) -> tuple[int, ...]:
    """Read boundaries, or the file that ``plan --json`` wrote.

    Args:
        text: such as ``0,5,9,14``, also with spaces or bars instead of commas, as partitions are printed; or a path.
        num_layers: L.
        num_stages: S; ``None``: as many as there are.

    Raises:
        UsageError: when it is neither, or no partition of so many layers.
    """
    planned = "what 'dynpipe plan --json' wrote"
    if Path(text).is_file():
        cuts = load_json(text, planned).get("boundaries")
        if not isinstance(cuts, list) or not all(type(cut) is int for cut in cuts):
            raise UsageError(f"{text}: has no list 'boundaries'; give the path of {planned}")
    else:
        try:
            cuts = [int(part) for part in re.split(r"[\s,|]+", text.strip("[]() "))]
        except ValueError:
            raise UsageError(
                f"partition {text!r}: must be boundaries such as 0,5,9,14 or the path of {planned}"
            ) from None
    with usage(f"partition {text}: "):
        stages = max(1, len(cuts) - 1) if num_stages is None else num_stages
        return check_boundaries(cuts, num_layers=num_layers, num_stages=stages, allow_empty=True)


def imported(name: str, *, where: str, remedy: str) -> ModuleType:
    """Import a module that Python finds from here or from the current folder.

    Args:
        name: of the module.
        where: it was named, for the message.
        remedy: what helps when it is not found.

    Raises:
        UsageError: when it is not found.
    """
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{where}: {error}; {remedy}") from error


# -- arguments -----------------------------------------------------------------------


def value_of(read: Callable[[str], Any], allows: Callable[[Any], bool], rule: str) -> Callable[[str], Any]:
    """Make a reader of one value for argparse.

    Args:
        read: turns the text into the value, or raises a ``ValueError``.
        allows: whether the value may be that.
        rule: completes "must be ...".
    """

    def value(text: str) -> Any:
        try:
            found = read(text)
        except ValueError:
            found = None
        if found is None or not allows(found):
            raise argparse.ArgumentTypeError(f"{text!r} must be {rule}")
        return found

    return value


def one_or_each(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Make a reader of one value, or of a list of them with commas between them."""

    def values(text: str) -> Any:
        found = [read(part.strip()) for part in text.split(",")]
        return found if len(found) > 1 else found[0]

    return values


def whole(least: int) -> Callable[[str], Any]:
    """Make a reader of whole numbers that are not smaller than one."""
    return value_of(int, lambda value: value >= least, f"a whole number >= {least}")


def listed(read: type[int] | type[float], kind: str) -> Callable[[str], Any]:
    """Make a reader of lists of numbers, such as ``1,2``."""
    rule = f"{kind} with commas between them, such as 1,2"
    return value_of(lambda text: [read(part) for part in text.split(",")], bool, rule)


seconds = value_of(float, lambda value: 0 <= value < float("inf"), "finite seconds >= 0, such as 0.002")
size = value_of(
    lambda text: int(str(parse_bytes(text))), lambda value: value >= 1,
    "a number of bytes >= 1 or a size such as 16GiB",
)  # fmt: skip


def add_simulated(parser: argparse.ArgumentParser) -> None:
    """Add what simulating commands share: the profile that :func:`load_profile` reads, micro-batches and links."""
    parser.add_argument("profile", help="layer times, as 'dynpipe profile' or engine.profile.save wrote them")
    parser.add_argument(
        "--micro-batches", type=whole(1), metavar="M", help="micro-batches of a batch (default: the profile's)"
    )
    parser.add_argument(
        "--activation-link-s", type=one_or_each(seconds), default=0.0, metavar="S",
        help="seconds that a micro-batch's activations take over a boundary; one number, or one a boundary (default 0)",
    )
    parser.add_argument(
        "--gradient-link-s", type=one_or_each(seconds), default=0.0, metavar="S",
        help="the same for gradients (default 0)",
    )  # fmt: skip


# -- showing -------------------------------------------------------------------------


def milliseconds(value_s: float) -> str:
    """Show seconds as milliseconds."""
    return _readable(value_s * 1e3)


def mebibytes(num_bytes: float) -> str:
    """Show bytes as MiB."""
    return _readable(num_bytes / 2**20)


def _readable(value: float) -> str:
    digits = 0 if value >= 10_000 else 1 if value >= 100 else 2 if value >= 1 or value == 0 else 4
    return f"{value:,.{digits}f}"


def percent(share: float) -> str:
    """Show a share."""
    return f"{share:.1%}"


def brackets(boundaries: Sequence[int]) -> str:
    """Show boundaries as everywhere: ``[0 5 9 14]``."""
    return "[" + " ".join(map(str, boundaries)) + "]"


def layer_spans(layers: Collection[int]) -> str:
    """Show layers, at least one, by their indices: ``layer 3``, ``layers 0-2, 7``."""
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and spans[-1][-1] == layer - 1:
            spans[-1].append(layer)
        else:
            spans.append([layer])
    shown = ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)
    return f"layer{'s' if len(layers) > 1 else ''} {shown}"
