"""Is a gain real? Noise of a series of batches, and how many of them must agree before layers move."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from itertools import pairwise
from statistics import fmean, median

# The constants were chosen by regret on synthetic traces like those of tests/decide/test_balancer.py: what a run of
# 60 batches loses to one that always has the best partition, moves included. Models that change by a half or a fifth,
# or slowly, under 10% and 20% noise lose a third of what they lose with CONFIDENCE = 4.5. One whose layers divide
# evenly is left alone for 500 batches, but for spikes: two of one rank in a row look like a change. With threefold
# spikes in 1% of a rank's batches, 13 of 80 runs moved there and back, for 0.03% of the time (0.3% at worst); a third
# batch of evidence would spare that, and cost runs of 60 batches in which the model changes by a half or more 0.2% of
# theirs. Where partitions tie, the odd move between them (at most 7 in 500 batches) gains 1% where the other one
# drains sooner, and loses 0.8% (2.6% at worst) under 10% noise of whole ranks where it drains later.

HISTORY = 64
"""Batches over which noise is measured and a gain may be confirmed.

With half as many, the measured noise is too often by chance half of the true one.
"""

EVIDENCE = 4
"""Batches that confirm a gain where a mistake is dear; the newest so many must each agree with it.

Two odd batches can mislead a median of three; four in a row are no accident.
"""

LEAST_EVIDENCE = 2
"""The same where moves are known to be cheap, see :func:`evidence_for`."""

CONFIDENCE = 2.0
"""A gain that the median of n batches shows must exceed ``CONFIDENCE * noise / n ** (1/3)``.

That is 1.3 standard deviations of one batch at n = 4 and 0.5 at n = 64: not certain, but a mistaken move costs a
fraction of a batch, and waiting for certainty under noise costs several. It falls slower than the
``1 / sqrt(n)`` of independent batches, since neighbouring batches are not independent and many n
are tried.
"""

SURE = 4.0
"""A change that exceeds so many standard deviations, with layers at their least of two batches, is no accident."""

LIKELY = 2.5
"""A gain of a plan that exceeds so many, seen in the same way, needs no other batch: a move can be undone."""

USUAL = 0.05
"""Relative noise of a machine of which little is known: what two ranks of one thread showed after 14 batches."""

_FEW = 6  # differences: more of them say by themselves what they vary by
_KNOWN_AS_WELL_AS = 2  # differences, before any was seen
_QUIET_SHARE = 0.75  # of the differences count as noise; the rest may be spikes and real changes
_QUIET_MEAN = 0.5148  # mean of |z| below its 75% quantile, z standard normal
_MEAN = 0.7979  # of all |z|: of three differences and fewer, none is set aside


def noise_of(series: Sequence[float], changes: Collection[int] = (), *, usual: float = math.inf) -> float:
    """Standard deviation of one value, from successive differences, or from how these differ, whichever is less.

    Differences leave out slow drift, and a step of the model is one difference only. Differences of differences leave
    out a model that changes fast, as much in one batch as in the next. The largest quarter of them (spikes, steps) is
    set aside; few differences count as noisier than they look.

    Args:
        series: values in the order of their batches.
        changes: positions of values before which the model was known to change: no such step is noise. Where all steps
            are such, they count all the same.
        usual: what would be thought without a series. With a few differences, both count; unless what is seen is less
            even if it is taken for noisier than it looks. Infinite: nothing is thought.

    Returns:
        The standard deviation, in the unit of the series; 0 for fewer than two values.
    """
    differences = [new - old for old, new in pairwise(series)]
    if not differences:
        return 0.0
    found = [_deviation(differences, usual)]
    bends = [(new - old) / math.sqrt(3.0) for old, new in pairwise(differences)]  # of noise as large as differences
    if len(bends) > 1:
        found.append(_deviation(bends, usual))
    if changes and (quiet := [each for i, each in enumerate(differences, start=1) if i not in changes]):
        found.append(_deviation(quiet, usual))
    return min(found)


def _deviation(differences: Sequence[float], usual: float) -> float:
    """Standard deviation of one value, by differences of two."""
    count = len(differences)
    quiet = sorted(map(abs, differences))[: math.ceil(_QUIET_SHARE * count)]
    mean = fmean(quiet) / math.sqrt(2.0)
    seen = mean / (_QUIET_MEAN if len(quiet) < count else _MEAN)
    cautious = (1.0 + 4.0 / count) * mean / _QUIET_MEAN
    if count > _FEW:
        return cautious
    return min(cautious, math.sqrt((_KNOWN_AS_WELL_AS * usual**2 + count * seen**2) / (_KNOWN_AS_WELL_AS + count)))


def evidence_for(saved_a_batch_s: float, cost_s: float) -> int:
    """How many batches must agree before a move: no longer a wait than a mistake costs.

    A mistaken move is paid twice, there and back; a batch of waiting costs what the move would have
    saved. Stopping when both are equal loses at most twice what hindsight would (ski rental).

    Args:
        saved_a_batch_s: predicted seconds saved in a batch, positive.
        cost_s: expected seconds for moving.

    Returns:
        From :data:`LEAST_EVIDENCE` to :data:`EVIDENCE`.
    """
    return min(EVIDENCE, max(LEAST_EVIDENCE, math.ceil(2.0 * cost_s / saved_a_batch_s)))


def confirming_batches(gains: Sequence[float], noise: float, min_gain: float, evidence: int) -> int:
    """Find the fewest newest batches that show a gain beyond doubt.

    Their median must exceed both ``min_gain`` and the noise (:data:`CONFIDENCE`), and each of the
    newest ``evidence`` must show half of that. Judged by batches that the plan was not made
    from as well, a plan that merely fits the noise of the newest ones fails.

    Args:
        gains: relative gain of the plan in each batch, oldest first.
        noise: standard deviation of one batch's gain.
        min_gain: least gain.
        evidence: fewest batches.

    Returns:
        The number of batches, at least ``evidence``; 0 when the gain is not confirmed.
    """
    if len(gains) < evidence:
        return 0
    least = min(gains[-evidence:])
    for num_batches in range(evidence, len(gains) + 1):
        needed = max(min_gain, CONFIDENCE * noise / num_batches ** (1 / 3))
        if least > needed / 2 and median(gains[-num_batches:]) > needed:
            return num_batches
    return 0
