"""Whether a command of the documentation is one: targets, modules, sub-commands, options, Hydra overrides."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import shlex
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from deepspeed.launcher.runner import parse_args
from hydra import compose, initialize_config_dir

from dynpipe_ds.cli.main import build_parser
from scenarios.settings import config_folder
from tests.docs import pages
from tests.docs.pages import ROOT

ENTRIES = ("scenarios.train", "scenarios.repack")
_GROUPS = "scenario|data|run|model|ds|deepspeed|output_dir|partition_method|seed|experiment"
_OVERRIDE = re.compile(rf"\+?(?:{_GROUPS})(?:\.\w+)*=.*")


def commands(page: str) -> list[str]:
    """Every command of a page: lines of its blocks, spans of its text."""
    lines: list[str] = []
    for block in pages.blocks(page, "", "bash", "sh"):
        lines += block.code.replace("\\\n", " ").splitlines()
    known = re.compile(r"(?:[A-Z_]+=\S+ )*(?:make|python|dynpipe|deepspeed) \S|… \S+=")
    found = [line.strip() for line in (*lines, *pages.spans(page)) if known.match(line.strip())]
    return [*found, *(span for span in pages.spans(page) if all(map(_OVERRIDE.fullmatch, span.split(" "))))]


def problem(command: str, page: str) -> str | None:
    """What is wrong with a command, if anything.

    Args:
        command: one line; words with ``…`` or ``<…>`` in them are left out.
        page: where it stands; ``docs/freezing.md`` is about the scenarios whose names begin with "freezing".
    """
    words = [word for word in shlex.split(command, comments=True) if not re.search(r"…|<.*>|^[A-Z]+$", word)]
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    for end in ("|", ">", "&&"):
        words = words[:words.index(end)] if end in words else words
    if not words:
        return None
    if _OVERRIDE.fullmatch(words[0]):
        return _overrides(words, page)
    return _CHECKS[words[0]](words[1:], page)


def _make(words: Sequence[str], page: str) -> str | None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words:
        name, given, value = word.partition("=")
        if given and not re.search(rf"^{name} *\?=", makefile, re.MULTILINE):
            return f"the Makefile has no variable {name}"
        if not given and not re.search(rf"^{re.escape(name)}:", makefile, re.MULTILINE):
            return f"the Makefile has no target {name}"
        if name == "SCENARIO" and (wrong := _overrides([f"scenario={value}"], page)):
            return wrong
        if name == "ARGS" and (wrong := _overrides(shlex.split(value), page)):
            return wrong
    return None


def _python(words: Sequence[str], _page: str) -> str | None:
    if words[0] == "-m":
        return None if importlib.util.find_spec(words[1]) else f"there is no module {words[1]}"
    return None if (ROOT / words[0]).exists() else f"there is no file {words[0]}"


def _dynpipe(words: Sequence[str], _page: str) -> str | None:
    if len(words) == 1 and words[0] != "doctor":
        words = [*words, "--help"]
    return _parsed(build_parser().parse_args, words)


def _deepspeed(words: Sequence[str], page: str) -> str | None:
    parsed: list[Any] = []
    wrong = _parsed(lambda given: parsed.append(parse_args(given)), words)
    if wrong is None and parsed[0].module and parsed[0].user_script in ENTRIES:
        return _overrides(parsed[0].user_args, page)
    return wrong


def _parsed(parse: Callable[[Sequence[str]], Any], words: Sequence[str]) -> str | None:
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told), contextlib.redirect_stdout(io.StringIO()):
            parse(list(words))
    except SystemExit as left:
        return told.getvalue().strip() if left.code else None
    return None


@lru_cache
def scenarios_of(page: str) -> tuple[str, ...]:
    """The scenarios that a page is about; the default one where it is about none."""
    stem = re.sub(r".*/|\.md$", "", page)
    names = sorted(path.stem for path in (config_folder() / "scenario").glob("*.yaml"))
    return tuple(name for name in names if name.startswith(stem)) or ("freezing",)


def _overrides(words: Sequence[str], page: str) -> str | None:
    if any(word.startswith("scenario=") for word in words):
        return _composed(tuple(words))
    told = [_composed((f"scenario={name}", *words)) for name in scenarios_of(page)]
    return None if None in told else told[0]


@lru_cache
def _composed(words: tuple[str, ...]) -> str | None:
    try:
        with initialize_config_dir(config_dir=str(config_folder()), version_base=None):
            compose("config", overrides=list(words))
    except Exception as error:  # Hydra has many kinds
        return f"{' '.join(words)}: {error}"
    return None


_CHECKS: dict[str, Callable[[Sequence[str], str], str | None]] = {
    "make": _make, "python": _python, "dynpipe": _dynpipe, "deepspeed": _deepspeed,
    "…": lambda words, page: _overrides(words, page),
}
