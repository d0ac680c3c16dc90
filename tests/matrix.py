"""Matrices of cases of which the usual ones run always, the others in ``make test-all``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
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
