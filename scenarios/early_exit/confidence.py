"""How sure an exit is of its prediction, and the threshold that it is held against."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# CALM's local confidence measures (softmax response, hidden-state saturation, early-exit classifier), and
# ADP-C's largest probability.
Measure = Literal["softmax", "state", "classifier", "probability"]
MEASURES: tuple[str, ...] = get_args(Measure)


def measure_confidence(
    measure: Measure, *, logits: Tensor, before: Tensor, after: Tensor, classifier: nn.Linear | None
) -> Tensor:
    """Measure how sure an exit is of each token.

    Only the classifier's own weights get a gradient from it.

    Args:
        measure: ``"softmax"``: difference of the two largest probabilities. ``"state"``: cosine similarity of
            the states before and after the block. ``"classifier"``: a learned linear layer's probability that
            the prediction is the one that the last layer would make. ``"probability"``: the largest one.
        logits: of the exit, ``[n, vocab]``, float32.
        before: state that the block was given, ``[n, hidden]``.
        after: state that it returned, ``[n, hidden]``.
        classifier: for that measure.

    Returns:
        ``[n]``, float32, in [0, 1] (in [-1, 1] for states).
    """
    if measure == "classifier":
        assert classifier is not None
        return torch.sigmoid(classifier(after.detach()).squeeze(-1).float())
    with torch.no_grad():
        if measure == "state":
            return F.cosine_similarity(before.float(), after.float(), dim=-1)
        probabilities = logits.softmax(-1)
        if measure == "probability" or logits.shape[-1] == 1:
            return probabilities.amax(-1)
        first, second = probabilities.topk(2, dim=-1).values.unbind(-1)
        return first - second


@dataclass(frozen=True)
class Decay:
    """CALM's decaying threshold: early positions must be surer than late ones.

    A token at position ``t`` of ``seq_len`` is held against
    ``0.9 threshold + 0.1 exp(-temperature * t / seq_len)``.

    Attributes:
        temperature: how fast it decays, ``tau`` in the paper; ``None`` for the same threshold everywhere.
        seq_len: longest sequence in tokens.
    """

    temperature: float | None
    seq_len: int

    def score(self, confidence: Tensor, positions: Tensor) -> Tensor:
        """Solve for the largest threshold that a token would pass.

        Comparing scores with one number is the same as comparing confidences with a threshold for each
        position, and lets a calibration search over that number.

        Args:
            confidence: any shape.
            positions: of the same shape, or broadcast to it.
        """
        if self.temperature is None:
            return confidence
        return (confidence - 0.1 * torch.exp(positions * (-self.temperature / self.seq_len))) / 0.9


@functools.cache
def thresholds() -> Tensor:
    """List the thresholds that a calibration tries: from 0 to 1, closest at both ends (321, float32)."""
    # Saturated states differ by less than a thousandth, so the steps are even on a logistic scale.
    steps = torch.linspace(-8, 8, 321, dtype=torch.float64).sigmoid()
    return ((steps - steps[0]) / (steps[-1] - steps[0])).float()


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What the tokens that never leave tell about every threshold that could be chosen.

    Attributes:
        blocks: blocks that a token would run through, the mean over them, for each threshold.
        differing: share of them whose prediction would differ from the last layer's, for each threshold.
        count: number of such tokens.
    """

    blocks: Tensor
    differing: Tensor
    count: int

    def for_share(self, share: float, depth: int) -> int:
        """Find the highest threshold with at most a share of the work.

        Args:
            share: blocks that a token runs through over all blocks.
            depth: number of blocks.

        Returns:
            Its index in :func:`thresholds`; 0 if even that one needs more.
        """
        cheap = (self.blocks <= share * depth).nonzero()
        return int(cheap[-1]) if len(cheap) else 0

    def for_consistency(self, limit: float, error_probability: float) -> int:
        """Find the lowest threshold that keeps predictions consistent.

        As CALM calibrates, by Learn then Test (Angelopoulos et al. 2021). Thresholds are tested from the highest
        down, each by Hoeffding's inequality ``exp(-2 n max(0, limit - differing)^2) <= error_probability``, until
        one fails (fixed-sequence testing, which needs no correction for testing many).

        Args:
            limit: largest share of tokens whose prediction may differ from the last layer's.
            error_probability: chance of being wrong about that.

        Returns:
            Its index in :func:`thresholds`; the last one (nearly nothing leaves) if none passes.
        """
        slack = (limit - self.differing).clamp(min=0)
        passes = (-2 * self.count * slack**2 <= math.log(error_probability)).tolist()
        chosen = len(passes) - 1
        while chosen > 0 and passes[chosen] and passes[chosen - 1]:
            chosen -= 1
        return chosen
