"""Functions looked at as objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynpipe_ds.functions import contents_of, nested_codes


def outer(value: int) -> Callable[[], Any]:
    def inner() -> Any:
        return lambda: (value, later)

    assert [contents_of(cell) for cell in inner.__closure__ or ()] == [(), (value,)], "`later` has no value yet"
    later = None
    return inner


def test_variables_with_and_without_a_value() -> None:
    inner = outer(3)
    assert inner.__code__.co_freevars == ("later", "value")
    assert [contents_of(cell) for cell in inner.__closure__ or ()] == [(None,), (3,)], "None is a value"


def test_the_code_inside_a_function() -> None:
    assert [code.co_name for code in nested_codes(outer.__code__)][:3] == ["outer", "inner", "<lambda>"]
