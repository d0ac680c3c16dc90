"""Is a plan worth moving layers for? By what a section asks for, the profiles so far, and what moves have cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.evidence import LIKELY, USUAL, confirming_batches, evidence_for, noise_of
from dynpipe_ds.decide.history import Gains, History
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition import Plan
from dynpipe_ds.simulation import predicted_batches_s

FIRST_COST = 0.05
"""What the first move is expected to cost, in batches: most take 0.02 to 0.1, the slowest of 289 took 0.25.

Nothing is known of a move before there was one, and one that is put off for ever teaches nothing.
"""

UNSEEN = 2
"""Batches that a plan was not made from, which show its gain without what chance has added to it."""

ROUNDING = 1e-9
"""Batches whose predicted seconds differ by a smaller share take equally long: sums round."""


@dataclass(frozen=True)
class Decision:
    """Whether to move, and why; all numbers are zero where the plan is the present partition.

    Args:
        rebalance: move to the planned partition now.
        reason: one short sentence for a person.
        saved_s: predicted seconds saved over the next N batches, or over ``horizon_batches``
            for 'auto'; negative when the plan is slower.
        cost_s: expected seconds for moving.
        noise: standard deviation of one batch's relative gain.
    """

    rebalance: bool
    reason: str
    saved_s: float
    cost_s: float
    noise: float


@dataclass(frozen=True)
class Prospect:
    """What a plan promises where orders are planned with partitions.

    Args:
        present_s: predicted seconds of a batch on the present partition, in its best order.
        planned_s: the same on the planned one.
        gains: what the planned partition would have saved at least of the newest batches, in whatever order.
    """

    present_s: float
    planned_s: float
    gains: Gains


def judge(
    plan: Plan, profile: PipelineProfile, history: History, config: DynamicPipelineConfig, cost_s: float | None,
    prospect: Prospect | None = None, num_unseen: int = 0,
) -> Decision:
    """Decide on a plan.

    Args:
        plan: the partitioner's choice.
        profile: the profile that it chose by; its boundaries are the present partition.
        history: earlier profiles.
        config: the section.
        cost_s: seconds that the move is expected to take; ``None``: nothing is known yet.
        prospect: of planned orders; ``None``: both run 1F1B.
        num_unseen: newest batches that the plan was not made from.
    """
    every = config.rebalance_every
    if tuple(plan.boundaries) == profile.boundaries:
        return Decision(False, "the present partition is the best one known", saved_s=0.0, cost_s=0.0, noise=0.0)
    if prospect is not None:
        batch_s, planned_s = prospect.present_s, prospect.planned_s
    else:
        batch_s, planned_s = predicted_batches_s(
            [(profile, profile.boundaries), (profile, plan.boundaries)], speeds=history.speeds.values
        )
    num_batches = every if isinstance(every, int) else config.horizon_batches
    saved_s = num_batches * (batch_s - planned_s)
    if abs(batch_s - planned_s) <= ROUNDING * batch_s:
        saved_s = 0.0
    cost_s = FIRST_COST * batch_s if cost_s is None else cost_s
    # A plan that keeps the bottleneck can still shorten the batch, by how it fills and drains.
    refines = prospect is not None or plan.predicted_gain <= 0 < saved_s
    gain = 1.0 - planned_s / batch_s if refines and batch_s else plan.predicted_gain
    noise = history.stage_noise(profile.boundaries)
    if prospect is not None:  # gains of bounds, of few batches: their steps are the model's, as often as not
        gains = prospect.gains
    else:
        gains = (history.batch_gains if refines else history.gains)(profile.boundaries, plan.boundaries)
        noise = max(noise, noise_of(gains.by_batch, usual=USUAL))
    if every == "never":
        rebalance, reason = False, "rebalance_every is 'never'"
    elif every == "auto":
        rebalance, reason = _pays(config, gains, noise, saved_s, cost_s, history.num_comparable)
        if not rebalance and prospect is not None and history.varies and saved_s > cost_s:
            shown = _saves_on_average(config, gains.by_batch)
            rebalance, reason = shown is not None, shown or reason
        waits = not rebalance and not history.varies
        if waits and saved_s / num_batches >= 2.0 * cost_s > 0:  # a mistake costs less than another wait
            shown = _is_shown(config, gains.by_batch[-num_unseen:], noise, num_unseen)
            rebalance, reason = shown is not None, shown or reason
    else:
        rebalance = gain > 0 and gain >= config.min_gain
        compared = "reaches" if rebalance else "is less than"
        reason = f"predicted gain {gain:.1%} {compared} min_gain {config.min_gain:.1%}"
    return Decision(rebalance, reason, saved_s, cost_s, noise)


def _pays(
    config: DynamicPipelineConfig, gains: Gains, noise: float, saved_s: float, cost_s: float, num_comparable: int
) -> tuple[bool, str]:
    """The rule of 'auto': the move pays for itself and the gain is real.

    Where layers were known to change, a difference is expected: all batches since then, how few they are, show it if
    it is beyond the noise.
    """
    money = f"{saved_s:.3g} s saved over {config.horizon_batches} batches, {cost_s:.3g} s to move"
    if saved_s <= cost_s or saved_s <= 0:
        return False, f"does not pay: {money}"
    is_likely = gains.sure > max(config.min_gain, LIKELY * noise)
    evidence = 1 if is_likely else evidence_for(saved_s / config.horizon_batches, cost_s)
    evidence = max(1, min(evidence, num_comparable))
    num_batches = confirming_batches(gains.by_batch, noise, config.min_gain, evidence)
    if not num_batches:
        seen = median(gains.by_batch[-evidence:]) if gains.by_batch else 0.0
        return False, f"gain {seen:.1%} not yet beyond min_gain and the noise of {noise:.1%}"
    return True, f"pays: {money}; gain confirmed by {num_batches} batches"


def _saves_on_average(config: DynamicPipelineConfig, gains: Sequence[float]) -> str | None:
    """Whether a plan is better on average where layers vary: by more than half of the error of that average.

    Certainty takes more batches than there are: a move that is expected to pay and does not costs no more than itself.
    """
    mean = fmean(gains)
    if mean <= max(config.min_gain, noise_of(gains) / math.sqrt(len(gains)) / 2):
        return None
    return f"gain {mean:.1%} on average of {len(gains)} batches, which vary"


def _is_shown(config: DynamicPipelineConfig, gains: Sequence[float], noise: float, num_unseen: int) -> str | None:
    """Whether batches that the plan was not made from show that it is better: all of them, by half of the noise."""
    if not UNSEEN <= num_unseen == len(gains) or min(gains) <= config.min_gain or median(gains) <= noise / 2:
        return None
    return f"gain {median(gains):.1%} shown by {num_unseen} batches that the plan was not made from"
