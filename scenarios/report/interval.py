"""How much a measured ratio may be off: 95% intervals from pairs that were measured in turns; numpy alone.

Two ways, for two kinds of pairs. Windows of batches are few, and batches within a window are alike because the machine
was: :func:`ratio_of_totals` takes whole windows as its pairs and Student's t. Repeats of one small action are many, and
some are hit by a stall: :func:`median_of_ratios` looks at the order of the pairs' ratios alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

SAME_PARTITION = "same partition: the difference is noise"
LEAST_PAIRS = 3
"""Pairs from which :func:`ratio_of_totals` tells an interval."""

_OUTSIDE = 0.025  # of the probability, on either side


@dataclass(frozen=True)
class Estimate:
    """A ratio with its 95% interval.

    Attributes:
        value: the ratio.
        low: begin of the interval; ``None`` if there are too few pairs for one.
        high: its end.
        pairs: how many pairs it is made of; 0 if they are not known.
    """

    value: float
    low: float | None = None
    high: float | None = None
    pairs: int = 0

    @property
    def change(self) -> Estimate:
        """What the ratio is more than one."""
        low, high = (None if bound is None else bound - 1 for bound in (self.low, self.high))
        return Estimate(self.value - 1, low, high, self.pairs)

    def text(self, form: str = ".2f", unit: str = "x") -> str:
        """``1.20x (1.15 to 1.25)``, or ``1.20x (no interval)``.

        Args:
            form: of the numbers.
            unit: behind the first one.
        """
        interval = "no interval" if self.low is None else f"{self.low:{form}} to {self.high:{form}}"
        return f"{self.value:{form}}{unit} ({interval})"


def ratio_of_totals(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The ratio of two sums, with the interval of a ratio estimator: Student's t over what pairs deviate from it.

    Pairs should not depend on each other: where neighbouring batches of a run are alike, a pair is a whole window of
    them. What changes from pair to pair for other reasons than noise (a model that shrinks) counts as scatter, so the
    interval is then too wide.

    Args:
        numerators: of every pair, seconds for example.
        denominators: the same, in the same order.

    Raises:
        ValueError: if there are not as many of both, or the denominators sum up to zero.
    """
    above, below = _pairs(numerators, denominators)
    ratio = float(above.sum() / below.sum())
    if (count := len(above)) < LEAST_PAIRS:
        return Estimate(ratio, pairs=count)
    deviations = above - ratio * below
    error = math.sqrt(count / (count - 1) * float(deviations @ deviations)) / float(below.sum())
    margin = _student(count - 1) * error
    return Estimate(ratio, max(0.0, ratio - margin), ratio + margin, count)


def median_of_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The median of the pairs' ratios, with the interval that their order gives: for any scatter, from six pairs on.

    Args:
        numerators: of every pair, seconds for example.
        denominators: the same, in the same order.

    Raises:
        ValueError: if there are not as many of both, none, or a denominator is zero.
    """
    above, below = _pairs(numerators, denominators)
    if not below.all():
        raise ValueError("denominators must not be zero: leave out what took no time")
    ratios = np.sort(above / below)
    count = len(ratios)
    least, outside = 0, 0.5**count  # chance that at most `least` ratios lie below the true median
    while outside <= _OUTSIDE:
        least += 1
        outside += math.comb(count, least) * 0.5**count
    bounds = (float(ratios[least - 1]), float(ratios[-least])) if least else (None, None)
    return Estimate(float(np.median(ratios)), *bounds, count)


def _pairs(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    above, below = (np.asarray(values, dtype=np.float64) for values in (numerators, denominators))
    if above.shape != below.shape or not below.sum():
        raise ValueError(
            f"{len(above)} numerators and {len(below)} denominators: give one of each for every pair, not all zero"
        )
    return above, below


def _student(freedom: int) -> float:
    """The quantile of Student's t that leaves 2.5% above it; within 1% of it from two degrees of freedom on.

    Args:
        freedom: degrees of freedom.
    """
    z = NormalDist().inv_cdf(1 - _OUTSIDE)
    return (  # Cornish and Fisher's expansion
        z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * freedom**4)
    )
