"""What commands read: files, partitions, modules of the user's, and the values of options."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from dynpipe_ds.cli.command import Parser, UsageError, usage
from dynpipe_ds.host.quiet import keep_deepspeed_quiet
from dynpipe_ds.journal import Journal, find_journals
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition import check_boundaries
from dynpipe_ds.planning import assume_halves
from dynpipe_ds.sections import parse_bytes


def profile(arguments: argparse.Namespace) -> PipelineProfile:
    """Read a profile file, with as many micro-batches and the halves of backwards that options say."""
    path, share_of_w = arguments.profile, arguments.weight_share
    try:
        found = PipelineProfile.load(path)
    except (ValueError, OSError) as error:
        wrong = f"{path}: no such file" if isinstance(error, FileNotFoundError) else error
        raise UsageError(f"{wrong}; write one with 'dynpipe profile' or engine.profile.save(path)") from error
    if share_of_w is not None:
        if has_halves(found):
            raise UsageError(f"--weight-share {share_of_w:g}: {path} has what was measured; leave it out")
        found = assume_halves(found, share_of_w)
    return found if arguments.micro_batches is None else replace(found, num_micro_batches=arguments.micro_batches)


def has_halves(found: PipelineProfile) -> bool:
    """Whether it is known what of a backward can be done later."""
    return any(layer.weight_s for layer in found.layers)


def json_object(path: str | None, what: str = "a DeepSpeed JSON") -> dict[str, Any]:
    """Read a JSON object from a file; without a path, an empty one."""
    if path is None:
        return {}
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


def partition(text: str, num_layers: int, num_stages: int | None = None) -> tuple[int, ...]:
    """Read boundaries of L layers and S stages as they are printed, or ``0,5,9,14``, or the file of ``plan --json``."""
    planned = "what 'dynpipe plan --json' wrote"
    if Path(text).is_file():
        cuts = json_object(text, planned).get("boundaries")
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


def module(name: str, *, where: str, remedy: str) -> ModuleType:
    """Import a module that Python finds from here or from the current folder, named by the user somewhere."""
    keep_deepspeed_quiet()  # the user's code may be the first to import it
    sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(f"{where}: {error}; {remedy}") from error


def value_of(read: Callable[[str], Any], allows: Callable[[Any], bool], rule: str) -> Callable[[str], Any]:
    """Make a reader for argparse, which says the rule, completing "must be ...", of what is not read or not allowed."""

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


def at_least_0(rule: str) -> Callable[[str], Any]:
    """Make a reader of finite numbers that are not negative."""
    return value_of(float, lambda value: 0 <= value < float("inf"), rule)


seconds = at_least_0("finite seconds >= 0, such as 0.002")
num_bytes = value_of(
    lambda text: int(str(parse_bytes(text))), lambda value: value >= 1,
    "a number of bytes >= 1 or a size such as 16GiB",
)  # fmt: skip


share = value_of(float, lambda value: 0 <= value <= 1, "a share from 0 to 1, such as 0.5")


def add_simulated(parser: Parser) -> None:
    """Add what simulating commands share: a profile, micro-batches and links."""
    link_s = (
        "seconds that a micro-batch's activations take to cross a boundary; one number, or one per boundary (default: "
        "as measured, if the profile has as many stages; else 0)"
    )
    parser.add_argument("profile", help="layer times, as 'dynpipe profile' or engine.profile.save wrote them")
    weight_share = (
        "for profiles in which no backward was split: the share of every backward that computes gradients of weights, "
        "and can run later"
    )
    parser.option("--weight-share", "SHARE", weight_share, share)
    parser.option("--micro-batches", "M", "micro-batches of a batch (default: the profile's)", whole(1))
    parser.option("--activation-link-s", "S", link_s, one_or_each(seconds))
    parser.option("--gradient-link-s", "S", "the same for gradients", one_or_each(seconds))


def add_journal(parser: Parser) -> None:
    """Add what commands share that read a journal."""
    parser.add_argument("folder", help='what "journal" names in the section, or a folder that holds it')
    parser.option("--run", "NAME", "of several runs in the folder: the one in the sub-folder of this name", dest="name")


def journal(arguments: argparse.Namespace) -> tuple[Journal, list[str]]:
    """Read the journal of the run that options say, and the names of those beside it.

    Raises:
        ValueError: when there is none, with the remedy.
    """
    files = find_journals(arguments.folder)
    names = [file.parent.name for file in files]
    if arguments.name is not None:
        if arguments.name not in names:
            raise ValueError(f"--run {arguments.name}: {arguments.folder} has {', '.join(names)}; give one of these")
        files = [files[names.index(arguments.name)]]
    journals = [_read_journal(file) for file in files]
    chosen = next((one for one in journals if _may_move(one)), journals[0])
    return chosen, [name for name in names if len(names) > 1 and name != chosen.file.parent.name]


def _read_journal(file: Path) -> Journal:
    found = Journal(file)
    found.update()
    return found


def _may_move(found: Journal) -> bool:
    return bool(found.about.get("settings", {}).get("rebalance_every") != "never")
