"""Names and types of settings, checked against the signature of what takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation

T = TypeVar("T")

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", NoneType: "null"}


def read(section: str, target: Callable[..., T], values: Mapping[str, Any], problems: list[str]) -> T | None:
    """Build a value from settings.

    Args:
        section: where the settings stand, for messages.
        target: a class that refuses values without a meaning with ``ValueError``.
        values: its keyword arguments.
        problems: gets one sentence for everything that is wrong.

    Returns:
        The value; ``None`` if there is a problem.
    """
    found = type_problems(section, target, values)
    try:
        if not found:
            return target(**values)
    except ValueError as error:
        found = [str(error)]
    problems += found
    return None


def type_problems(section: str, target: Callable[..., Any], values: Mapping[str, Any]) -> list[str]:
    """Say which settings a class or function does not take: unknown names, values of another type.

    Args:
        section: where the settings stand, for messages; may be empty.
        target: a class, or a function; parameters without a type take any value.
        values: the settings.

    Returns:
        One sentence for each, with what is valid.
    """
    parameters = inspect.signature(target).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    hints, problems = _hints(target), []
    for name, value in values.items():
        path = f"{section}.{name}" if section else name
        if name not in parameters:
            problems.append(f"{path} is not a setting: {choices(name, list(parameters))}")
        elif name in hints and not _fits(value, hints[name]):
            problems.append(f"{path}={value!r} must be {_rule(hints[name])}")
    return problems


def choices(wrong: str, valid: list[str]) -> str:
    """Name what is valid, the nearest one first."""
    near = get_close_matches(wrong, valid, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{meant}choose one of {', '.join(valid)}" if valid else "there is none"


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Types of the parameters, those that are known."""
    is_plain_class = inspect.isclass(target) and not hasattr(target, "__dataclass_fields__")
    try:
        return get_type_hints(target.__init__ if is_plain_class else target)  # type: ignore[misc]
    except (NameError, TypeError):  # a name that is imported for type checkers only
        return {}


def _fits(value: Any, hint: Any) -> bool:
    try:
        TypeAdapter(hint).validate_python(value, strict=True)
    except ValidationError:
        return False
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation):  # of a type with rules of its own
        pass
    return True


def _rule(hint: Any) -> str:
    """What a value must be, completing "must be ..."."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_rule(argument) for argument in arguments))
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return "a section with keys and values"
    if origin is not None and arguments:
        return f"a list, each {_rule(arguments[0])}"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))
