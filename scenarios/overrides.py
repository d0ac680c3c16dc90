"""What is wrong with overrides of the command line, each with the choices that there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from scenarios.checking import choices
from scenarios.settings import config_folder


def explain(overrides: Sequence[str], error: Exception) -> str:
    """Say why a configuration can't be composed.

    Args:
        overrides: of the command line.
        error: what Hydra raised, for what is no single override's fault.

    Returns:
        One sentence for every override that is wrong.
    """
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as wrong:
        return f"{wrong.override!r} can't be read: {_first_line(wrong)}"
    problems: list[str] = []
    kept: list[str] = []
    with initialize_config_dir(config_dir=str(config_folder()), version_base=None):
        for override in sorted(parsed, key=lambda one: "." in one.key_or_group):  # groups decide what keys there are
            if override.key_or_group.startswith("hydra"):
                continue
            singles = _singles(override)
            wrong = [_explain_one(override, single, kept) for single in singles]
            problems += filter(None, wrong)
            if singles and not any(wrong):
                kept.append(singles[-1])
    return "; ".join(problems) or _first_line(error)


def _singles(override: Override) -> list[str]:
    """The overrides that a sweep is made of; itself, if it is none."""
    if isinstance(override.value(), Glob):  # of what there is, so none of it is wrong
        return []
    if override.is_discrete_sweep():
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    return [str(override.input_line)]


def _explain_one(override: Override, single: str, kept: list[str]) -> str | None:
    """Say what is wrong with an override after those that are right; ``None``: nothing."""
    try:
        compose("config", overrides=[*kept, single])
        return None
    except (HydraException, OmegaConfBaseException) as wrong:
        error = wrong
    group = config_folder() / override.key_or_group
    if group.is_dir():
        options = sorted(file.stem for file in group.glob("*.yaml"))
        value = single.partition("=")[2]
        if value not in options:
            return f"{single}: {choices(value, options)}"
        return f"{single}: {_first_line(error)}"
    node: Any = compose("config", overrides=kept)
    *path, name = override.key_or_group.split(".")
    parents = []
    for parent in path:
        if not isinstance(node, DictConfig) or parent not in node or not isinstance(node[parent], DictConfig):
            name = parent
            break
        node = node[parent]
        parents.append(parent)
    if name in node:
        return f"{single}: {_first_line(error)}"
    more = "; another key of DeepSpeed's JSON takes a + before it" if parents[:1] == ["ds"] else ""
    return f"{single}: {'.'.join(parents) or 'the configuration'} has no {name!r}: {choices(name, list(node))}{more}"


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n\n")[0].split())
