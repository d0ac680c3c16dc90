"""Which cases of a matrix run when."""

from __future__ import annotations

import pytest

from tests.matrix import mostly, only_combine


def test_every_value_is_in_a_case_that_is_no_combination() -> None:
    cases = [{"a": a, "b": b} for a in (1, 2, 3) for b in "xy"]
    usual = [case == {"a": 1, "b": "x"} for case in cases]
    combines = only_combine(cases, usual)
    assert combines == [False, False, False, True, False, True]
    rest = [case for case, left in zip(cases, combines, strict=True) if not left]
    assert {case["a"] for case in rest} == {1, 2, 3}
    assert {case["b"] for case in rest} == {"x", "y"}


def test_a_test_without_parameters_is_no_combination() -> None:
    assert only_combine([{}], [False]) == [False]


def test_values_that_can_t_be_shown_differ() -> None:
    class Fails:
        def __repr__(self) -> str:
            raise ImportError("not here")

    assert only_combine([{"a": Fails()}, {"a": Fails()}], [True, False]) == [False, False]


def test_usual_cases_run_always() -> None:
    first, second = mostly([(1, "x"), (2, "x")], [(1, "x")])
    assert not first.marks
    assert [mark.name for mark in second.marks] == ["exhaustive"]
    with pytest.raises(AssertionError, match="are not all among the cases"):
        mostly([1, 2], [3])
