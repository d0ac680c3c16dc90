"""What all commands share: reading arguments, printing a result, saying what is wrong."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.sections import parse_bytes

OK = 0
"""The command did what it was asked."""

PROBLEMS = 1
"""The command ran and found problems: a failed check, no partition that fits, a model that can't be run."""

USAGE = 2
"""A wrong argument or a file that can't be used: nothing was computed."""

Result = tuple[int, str, Mapping[str, Any]]
"""Exit code, the text for people, and the same as values for ``--json``."""


class UsageError(ValueError):
    """An argument or a file that can't be used; one line with value, rule and remedy."""


class ProblemError(ValueError):
    """The command was understood and the answer is that it can't be done; one line."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line each, and whose help ends in examples as they are typed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong in one line and leave with the code for wrong usage."""
        print(f"{self.prog}: error: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(USAGE)


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], Result], *, what: str, more: str, examples: str
) -> Parser:
    """Add a command, with ``--json``.

    Args:
        commands: what ``add_subparsers`` returned.
        name: of the command.
        run: carries it out.
        what: one line on it.
        more: a paragraph on it.
        examples: command lines, one below the other.

    Returns:
        Its parser.
    """
    lines = "\n".join(f"  {line}" for line in examples.strip().splitlines())
    parser: Parser = commands.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.\n\n{more.strip()}",
        epilog=f"examples:\n{lines}\n\nexit codes: 0 done, 1 problems found, 2 wrong usage",
    )
    add_json(parser)
    parser.set_defaults(run=run, parser=parser)
    return parser


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``, which may stand before the command as well as after it."""
    # Without a default, so that the command's parser leaves alone what was given before the command.
    parser.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the result as JSON")


def show(result: Result, *, as_json: bool) -> int:
    """Print a result and return its exit code.

    Args:
        result: what a command returned.
        as_json: print the values instead of the text.
    """
    code, text, values = result
    print(json.dumps(values, indent=1, allow_nan=False) if as_json else text)
    return code


def load_profile(path: str, num_micro_batches: int | None = None) -> PipelineProfile:
    """Read a profile file.

    Args:
        path: of the JSON file.
        num_micro_batches: M to use instead of the profile's own.

    Raises:
        UsageError: when there is no such file or it is no profile.
    """
    remedy = "write one with 'dynpipe profile' or engine.profile.save(path)"
    try:
        profile = PipelineProfile.load(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; {remedy}") from None
    except (ValueError, OSError) as error:
        raise UsageError(f"{error}; {remedy}") from error
    if num_micro_batches is None:
        return profile
    return PipelineProfile(profile.batch, profile.boundaries, num_micro_batches, profile.layers, profile.stages)


def load_json(path: str, what: str) -> dict[str, Any]:
    """Read a JSON object from a file.

    Args:
        path: of the file.
        what: it should hold, for the message.

    Raises:
        UsageError: when there is no such file or it holds something else.
    """
    file = Path(path)
    if not file.is_file():
        raise UsageError(f"{path}: no such file; give the path of {what}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{path}: not valid JSON ({error}); give the path of {what}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: holds a JSON {type(values).__name__}, not an object; give the path of {what}")
    return values


def boundaries_of(text: str) -> tuple[int, ...]:
    """Read boundaries, or the file that ``plan --json`` wrote.

    Args:
        text: such as ``0,5,9,14``, also with spaces or bars instead of commas, as partitions are printed; or a path.

    Raises:
        UsageError: when it is neither.
    """
    if Path(text).is_file():
        values = load_json(text, "what 'dynpipe plan --json' wrote").get("boundaries")
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise UsageError(f"{text}: has no list 'boundaries'; give the path of what 'dynpipe plan --json' wrote")
        return tuple(values)
    try:
        return tuple(int(part) for part in re.split(r"[\s,|]+", text.strip("[]() ")))
    except ValueError:
        raise UsageError(
            f"partition {text!r}: must be boundaries such as 0,5,9,14 or the path of what 'dynpipe plan --json' wrote"
        ) from None


def listed_problems(error: ValueError) -> list[str]:
    """The problems in an error of the configuration's, which lists them below a title.

    Args:
        error: what was raised.

    Returns:
        One line each; the whole text if it lists none.
    """
    lines = [line.strip() for line in str(error).splitlines()]
    listed = [line.removeprefix("- ") for line in lines if line.startswith("- ")]
    return listed or [" ".join(lines)]


def _each(text: str, read: Callable[[str], Any]) -> Any:
    """One value, or a list of those between commas."""
    values = [read(part.strip()) for part in text.split(",")]
    return values if len(values) > 1 else values[0]


def sizes(text: str) -> Any:
    """Read ``16GiB`` or ``16GiB,8GiB`` for argparse: bytes, or a list of them."""

    def read(part: str) -> int:
        value = parse_bytes(part)
        if isinstance(value, str):
            value = int(value) if value.isdigit() else 0
        if not isinstance(value, int) or value < 1:
            raise argparse.ArgumentTypeError(f"{part!r} must be a number of bytes >= 1 or a size such as 16GiB")
        return value

    return _each(text, read)


def seconds(text: str) -> Any:
    """Read ``0.002`` or ``0,0.02,0`` for argparse: seconds, or a list of them."""

    def read(part: str) -> float:
        try:
            value = float(part)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{part!r} must be finite seconds >= 0, such as 0.002")
        return value

    return _each(text, read)


def whole(least: int) -> Callable[[str], int]:
    """Make a reader of whole numbers for argparse.

    Args:
        least: the smallest one allowed.
    """

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number >= {least}")
        return value

    return read


def add_profile(parser: argparse.ArgumentParser) -> None:
    """Add the profile that :func:`load_profile` reads."""
    parser.add_argument("profile", help="layer times, as 'dynpipe profile' or engine.profile.save wrote them")


def add_links(parser: argparse.ArgumentParser) -> None:
    """Add the options on links and micro-batches that simulating commands share."""
    parser.add_argument(
        "--micro-batches", type=whole(1), metavar="M", help="micro-batches of a batch (default: the profile's)"
    )
    parser.add_argument(
        "--activation-link-s", type=seconds, default=0.0, metavar="S",
        help="seconds that a micro-batch's activations take over a boundary; one number, or one a boundary (default 0)",
    )
    parser.add_argument(
        "--gradient-link-s", type=seconds, default=0.0, metavar="S", help="the same for gradients (default 0)"
    )


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
    """Show layers by their indices: ``layer 3``, ``layers 0-2, 7``.

    Args:
        layers: indices, at least one.
    """
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and spans[-1][-1] == layer - 1:
            spans[-1].append(layer)
        else:
            spans.append([layer])
    shown = ", ".join(str(s[0]) if len(s) == 1 else f"{s[0]}-{s[-1]}" for s in spans)
    return f"layer{'s' if len(layers) > 1 else ''} {shown}"


def last_lines(log: Path) -> str:
    """The last two lines that a process printed, as one.

    Args:
        log: what it printed.
    """
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return " | ".join([line.strip() for line in lines if line.strip()][-2:])[-600:] or "it printed nothing"
