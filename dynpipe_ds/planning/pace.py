"""How fast planning is: what it may look at in its share of the time follows from it, so all ranks say the same."""

from __future__ import annotations

from typing import NamedTuple


class Pace(NamedTuple):
    """How fast planning is; measured on one busy processor.

    Attributes:
        computations_per_s: forwards, backwards and weight gradients that it looks at in a second; as many are counted
            for what else takes its time.
        any_plan: computations that could be looked at in the time that a plan takes however few there are.
        bounds_a_computation: bounds of one batch on one partition that take as long as looking at a computation.
        cells_a_computation: choices of a stage's groups that take as long.
    """

    computations_per_s: int
    any_plan: int
    bounds_a_computation: float
    cells_a_computation: float


IN_PYTHON = Pace(350_000, any_plan=500, bounds_a_computation=5, cells_a_computation=30)
AS_MACHINE_CODE = Pace(4_000_000, any_plan=12_000, bounds_a_computation=0.4, cells_a_computation=2.5)


class _Now:
    """Attributes: pace: how fast planning is said to be."""

    pace = IN_PYTHON


def pace() -> Pace:
    """How fast planning is said to be."""
    return _Now.pace


def agree_on_pace(*, is_compiled: bool) -> None:
    """Say how fast planning is from now on; plans depend on it, so it is the same on all ranks.

    Args:
        is_compiled: whether loops run as machine code on all of them.
    """
    _Now.pace = AS_MACHINE_CODE if is_compiled else IN_PYTHON
