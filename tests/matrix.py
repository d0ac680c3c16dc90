"""Matrices of cases: usual ones run always, every value in ``make test-all``, combinations in ``make test-every``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def mostly(cases: Iterable[Any], usual: Collection[Any]) -> list[ParameterSet]:
    """Parameters for ``pytest.mark.parametrize``.

    Args:
        cases: values, tuples of values, or ``pytest.param`` with an id.
        usual: those that run always, by value or by id.
    """
    found = []
    for case in cases:
        is_set = isinstance(case, ParameterSet)
        values = case.values if is_set else case if isinstance(case, tuple) else (case,)
        name = case.id if is_set else "-".join(map(str, values))
        known = name if is_set else case
        found.append(pytest.param(*values, id=name, marks=() if known in usual else pytest.mark.exhaustive))
    assert sum(not case.marks for case in found) == len(usual), f"{usual} are not all among the cases"
    return found


def only_combine(cases: Sequence[Mapping[str, Any]], usual: Sequence[bool]) -> list[bool]:
    """Which cases of one test have no value of their own: each of their values has been in an earlier or usual case.

    Args:
        cases: values of a test's parameters, by name.
        usual: whether a case runs always, for each.
    """
    known = {_value(*pair) for case, runs in zip(cases, usual, strict=True) if runs for pair in case.items()}
    found = []
    for case, runs in zip(cases, usual, strict=True):
        values = {_value(*pair) for pair in case.items()}
        found.append(bool(case) and not runs and values <= known)
        known |= values
    return found


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark collected cases that only combine values of others."""
    tests: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            tests[item.location[0], item.originalname].append(item)
    for cases in tests.values():
        parameters = [dict(case.callspec.params) if hasattr(case, "callspec") else {} for case in cases]
        usual = [case.get_closest_marker("exhaustive") is None for case in cases]
        for case, combines in zip(cases, only_combine(parameters, usual), strict=True):
            if combines:
                case.add_marker(pytest.mark.combination)


def _value(name: str, value: Any) -> tuple[str, str]:
    """What tells a parameter's values apart; not all of them can be compared or hashed."""
    try:
        return name, repr(value)
    except Exception:  # an object that is made to fail
        return name, str(id(value))
