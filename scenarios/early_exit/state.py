"""What passes between the layers of a model with exits, and what all of them know."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from scenarios.early_exit.confidence import Decay, Measure

# What ``ExitState.exits`` says of tokens that have not left; all of these are negative.
STILL_IN = -1
AUDITOR = -2
LAST = -3


class ExitState(NamedTuple):
    """What passes from layer to layer; all shapes are fixed, whoever leaves.

    Attributes:
        stream: residual stream ``[batch, seq, hidden]``; a token that left keeps the state it left with.
        tokens: token ids ``[batch, seq]``, the labels of the exits one position later.
        exits: the exit at which each token left, ``[batch, seq]``. Until then ``STILL_IN``; ``AUDITOR`` and
            ``LAST`` for those that never leave: auditors, and the last position of a row, whose label the
            tokens do not tell.
        loss: of the exits so far, float32 scalar.
        confidences: of each exit that a token has passed, 0 elsewhere, ``[batch, seq, exits]``, float32.
        predictions: the likeliest next token by each exit, same shape, int64.
    """

    stream: Tensor
    tokens: Tensor
    exits: Tensor
    loss: Tensor
    confidences: Tensor
    predictions: Tensor


class ExitOutput(NamedTuple):
    """What the last layer returns: predictions of the tokens that no exit has accounted for.

    Attributes:
        logits: ``[n, vocab]``.
        places: of these tokens in the flattened ``[batch * seq]``, ``[n]``.
        weights: of their cross entropies in the loss, ``[n]``.
        loss: of all exits, float32 scalar.
    """

    logits: Tensor
    places: Tensor
    weights: Tensor
    loss: Tensor


@dataclass(frozen=True, kw_only=True)
class ExitPlan:
    """What all layers know of the exits.

    Attributes:
        blocks: number of blocks before each exit, the last one being the head's: all of them.
        loss_weights: of each exit's cross entropy, the head's included.
        measure: of confidence.
        decay: of the threshold over positions.
        visible: whether tokens that left are keys and values in later blocks.
        audit_every: one token in so many is an auditor while training; 0 for none.
    """

    blocks: tuple[int, ...]
    loss_weights: tuple[float, ...]
    measure: Measure
    decay: Decay
    visible: bool
    audit_every: int

    @property
    def num_exits(self) -> int:
        """Exits before the head."""
        return len(self.blocks) - 1

    def weight_from(self, exit_index: int) -> float:
        """Sum the weights from an exit on: what a token counts that leaves there."""
        return math.fsum(self.loss_weights[exit_index:])
