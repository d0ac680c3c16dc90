"""Formulas for stages of equal time, to check the simulator by and to compare schedules with."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum


def equal_stages_s(
    num_stages: int, num_micro_batches: int, forward_s: float, backward_s: float
) -> float:
    """Makespan of GPipe and of 1F1B when all stages take the same time and links take none.

    ``(M + S - 1) (f + b)`` (GPipe: Huang et al. 2019, section 2.3; 1F1B has the same bubble:
    PipeDream-Flush, Narayanan et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training").

    Args:
        num_stages: S.
        num_micro_batches: M.
        forward_s: forward seconds of a micro-batch on a stage.
        backward_s: the same for the backward.

    Returns:
        Seconds.
    """
    return (num_micro_batches + num_stages - 1) * (forward_s + backward_s)


def bubble_ratio_1f1b(num_stages: int, num_micro_batches: int) -> float:
    """Idle share of every stage under GPipe or 1F1B with equal stages, ``(S - 1) / (M + S - 1)``.

    Args:
        num_stages: S.
        num_micro_batches: M.

    Returns:
        A share from 0 to 1.
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def chimera_bubble_ratio(
    num_stages: int, num_micro_batches: int, *, forward_s: float = 1.0, backward_s: float = 1.0
) -> float:
    """Idle share under Chimera's two pipelines in opposite directions, for reference only.

    Chimera (Li & Hoefler 2021, "Chimera: Efficiently Training Large-Scale Neural Networks with
    Bidirectional Pipelines", section 3.1) has ``D - 2`` bubbles a worker instead of ``2 (D - 1)``. Its
    critical path has N forwards and ``N + D - 2`` backwards (for N = D = 6, 6 and 10, as counted in its
    performance model), of which a worker computes N each, so ``(D - 2) b`` is idle::

        (D - 2) b / (N (f + b) + (D - 2) b)

    With ``f = b`` that is the paper's ``(D - 2) / (2 N + D - 2)``, with ``b = 2 f`` the
    ``(D - 2) / (3 N / 2 + D - 2)`` of its table. It holds for N = D; for larger N it takes the
    concatenation of such units to be without further bubbles.

    Args:
        num_stages: D, even.
        num_micro_batches: N, at least D and a multiple of it for the formula to be reached.
        forward_s: f, forward seconds of a micro-batch on a stage.
        backward_s: b, backward seconds.

    Returns:
        A share from 0 to 1.

    Raises:
        ValueError: for an odd number of stages.
    """
    if num_stages < 2 or num_stages % 2:
        raise ValueError(f"num_stages = {num_stages}: Chimera pairs two directions, it must be even")
    idle_s = (num_stages - 2) * backward_s
    return idle_s / (num_micro_batches * (forward_s + backward_s) + idle_s)


def flow_line_s(stage_seconds: Sequence[float], num_micro_batches: int) -> float:
    """Seconds of equal jobs on a line of unequal stages, ``(M - 1) max + sum``.

    The slowest stage paces all micro-batches but one, and one passes through every stage. For equal
    stages it is :func:`equal_stages_s`. With unequal ones 1F1B is mostly faster, since work before and
    after the slowest stage hides behind it (by up to 17% for log-normal stage times, sigma 0.5, on 8
    stages with 16 micro-batches), and seldom slower, where the stages' shares of forward differ.

    Args:
        stage_seconds: S forward and backward seconds of one micro-batch.
        num_micro_batches: M.

    Returns:
        Seconds.
    """
    return (num_micro_batches - 1) * max(stage_seconds) + fsum(stage_seconds)
