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
_GROUPS = "scenario|data|run|model|ds|deepspeed|launch|output_dir|partition|partition_method|seed|experiment"
_OVERRIDE = re.compile(rf"\+?(?:{_GROUPS})(?:\.\w+)*=.+")


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
    given = dict(word.split("=", 1) for word in words if "=" in word)
    for name in given:
        if not re.search(rf"^{name} *\?=", makefile, re.MULTILINE):
            return f"the Makefile has no variable {name}"
    for target in (word for word in words if "=" not in word):
        if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE):
            return f"the Makefile has no target {target}"
    scenario = [f"scenario={given['SCENARIO']}"] if "SCENARIO" in given else []
    overrides = [*scenario, *shlex.split(given.get("ARGS", ""))]
    return _overrides(overrides, page) if overrides else None


def _python(words: Sequence[str], page: str) -> str | None:
    if words[0] == "-m":
        if words[1] in ENTRIES:
            # Of a sweep the first one: a=1,2 is a=1.
            sweep = {"-m", "--multirun"} & set(words[2:])
            overrides = [re.sub(r"=([^,\[(]+),.*", r"=\1", word) if sweep else word for word in words if "=" in word]
            return _overrides(overrides, page)
        return None if _is_module(words[1]) else f"there is no module {words[1]}"
    return None if (ROOT / words[0]).exists() else f"there is no file {words[0]}"


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


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
