"""Python's functions looked at as objects: their code, and what their variables hold."""

from __future__ import annotations

from collections.abc import Iterator
from types import CellType, CodeType
from typing import Any


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_codes(constant)


def contents_of(cell: CellType) -> tuple[Any, ...]:
    """What a variable of an enclosing function holds, as the only item; nothing before it has a value."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
