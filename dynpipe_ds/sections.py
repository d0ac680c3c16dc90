"""Typed sections of the DeepSpeed JSON: keys with a rule and an example, every problem at once.

A section is a :class:`Section`, a pydantic model whose keys are declared with :func:`key`.
:func:`read_section` validates a mapping and collects *all* problems, so that a user corrects a file once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from difflib import get_close_matches
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_BYTE_UNITS = {
    "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_BYTES_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*((?:[KMGT]i?)?B)\s*", re.IGNORECASE)
_BYTES_PATTERN = r"^\s*\d+(\.\d+)?\s*([KMGTkmgt][iI]?)?[Bb]\s*$"  # the same as a JSON schema has it

SectionT = TypeVar("SectionT", bound="Section")
Problems = dict[Any, list[str]]
"""Lines by key; key ``None``: between keys."""


def parse_bytes(value: object) -> object:
    """Turn a size written as text into a number of bytes.

    Args:
        value: for example ``"16GiB"`` (powers of 1024), ``"1.5 GB"`` (powers of 1000).

    Returns:
        The whole number of bytes; anything that is not such text is returned as it is, for the
        field's own rule to judge.
    """
    match = _BYTES_TEXT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return value
    return int(Decimal(match[1]) * _BYTE_UNITS[match[2].upper()])


class AlsoText:
    """Marks a number of bytes that :func:`parse_bytes` may have read from text, for JSON schemas."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        """A number, or a size as text."""
        return {"anyOf": [handler(schema), {"type": "string", "pattern": _BYTES_PATTERN}]}


def key(default: Any, meaning: str, *, rule: str, example: str) -> Any:
    """Declare a key whose error message states the same rule as the documentation.

    Args:
        default: value when the key is missing; ``...`` for a key that must be given.
        meaning: what the key does.
        rule: what a value must be, completing "must be ...".
        example: a value that is right.
    """
    extra: dict[str, Any] = {"rule": rule, "example": example}
    return Field(default, description=meaning, json_schema_extra=extra)


class ContradictionError(ValueError):
    """Keys of the section that can't both be meant.

    Args:
        problems: one line each, with the values, the rule and the remedy.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


class Section(BaseModel):
    """A section; types are strict (``true`` is not 1, ``"5"`` is not 5) and unknown keys are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @classmethod
    def nested(cls) -> Mapping[str, Callable[[Mapping[Any, Any]], type[Section]]]:
        """Keys that hold a section of their own, and how to tell its type from its content."""
        return {}

    def contradictions(self) -> Iterable[str]:
        """Yield what can't both be meant, one line each with values, rule and remedy."""
        return ()

    def is_given(self, name: str) -> bool:
        """Whether a key differs from its default.

        So a section with every default written out stays valid whatever single key is changed.
        """
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @model_validator(mode="after")
    def _refuse_contradictions(self: SectionT) -> SectionT:
        problems = list(self.contradictions())
        if problems:
            raise ContradictionError(problems)
        return self


def read_section(
    model: type[SectionT], section: Mapping[Any, Any], prefix: str = ""
) -> tuple[SectionT | None, Problems]:
    """Validate a section and those inside it.

    Args:
        model: its type.
        section: as read from the JSON.
        prefix: written before every key in the messages, such as ``"repack."``.

    Returns:
        The section, or ``None`` and all of its problems.
    """
    values, nested = dict(section), dict[Any, list[str]]()
    for name, type_of in model.nested().items():
        inner = values.get(name)
        if isinstance(inner, Mapping):
            value, lines = read_section(type_of(inner), inner, f"{prefix}{name}.")
            values[name] = value
            if value is None:
                nested[name] = [line for some in lines.values() for line in some]
                del values[name]
    config, problems = _validate(model, values, prefix)
    if config is None and any(problems.values()):
        # Contradictions are looked for only between valid keys: look again without the others.
        _, rest = _validate(model, {k: value for k, value in values.items() if k not in problems}, prefix)
        wrong = [f"{prefix}{k} = " for k in (*problems, *nested)]  # their defaults must not contradict anything
        rest = {k: [line for line in lines if not any(w in line for w in wrong)] for k, lines in rest.items()}
        problems |= {k: lines for k, lines in rest.items() if k not in problems}
    return (None if nested else config), nested | {k: v for k, v in problems.items() if k not in nested}


def _validate(model: type[SectionT], section: dict[Any, Any], prefix: str) -> tuple[SectionT | None, Problems]:
    try:
        return model.model_validate(section), {}
    except ValidationError as error:
        problems: Problems = {}
        for detail in error.errors():
            name = detail["loc"][0] if detail["loc"] else None
            cause = detail.get("ctx", {}).get("error")
            if isinstance(cause, ContradictionError):
                problems[None] = list(cause.problems)
            elif name not in problems:  # a union reports once for each of its branches
                problems[name] = [_describe(model, name, section, prefix)]
        return None, problems


def _describe(model: type[Section], name: object, section: Mapping[Any, Any], prefix: str) -> str:
    """One line on a key that is unknown or missing, or whose value breaks its rule."""
    keys = model.model_fields
    if name not in keys:
        near = get_close_matches(str(name), keys, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(keys)}"
        return f"{prefix}{name} = {show(section[name])}: not a key of this section; {remedy}"
    extra = keys[str(name)].json_schema_extra
    assert isinstance(extra, dict)
    given = f" = {show(section[name])}: must be" if name in section else " is missing: give"
    return f"{prefix}{name}{given} {extra['rule']}; for example {extra['example']}"


def show(value: object) -> str:
    """A value for a message, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
