"""Which tokens pass through a block: by rank in training, by a prediction of the rank afterwards."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scenarios.gpt import INIT_STD


class Choice(NamedTuple):
    """The tokens of every sequence that a block computes.

    Attributes:
        tokens: their indices, ``[batch, chosen]`` of int64, each sequence's in the order of the text.
        counts: 1 where a token is meant, 0 where it only fills up a shorter row, ``[batch, chosen]``;
            ``None`` where all are meant.
    """

    tokens: Tensor
    counts: Tensor | None = None


def num_chosen(capacity: float, seq_len: int) -> int:
    """Count the tokens of a sequence that a block computes.

    Args:
        capacity: share of the tokens, in [0, 1].
        seq_len: tokens of the sequence.
    """
    return max(0, round(capacity * seq_len))


def top_tokens(scores: Tensor, count: int) -> Choice:
    """Choose the tokens with the largest scores of each sequence; of equal ones the earlier.

    Args:
        scores: ``[batch, seq]``.
        count: tokens a sequence, at most ``seq``.
    """
    ranked = scores.detach().sort(dim=1, descending=True, stable=True).indices
    return Choice(ranked[:, :count].sort(dim=1).values)


def wanted_tokens(wanted: Tensor) -> Choice:
    """Choose the tokens that are wanted, however many each sequence has.

    Shorter rows are filled up with tokens that are not wanted, behind the wanted ones, where causal
    attention hides them. A row has at least one token, so that replicas whose blocks talk to each other
    all run theirs.

    Args:
        wanted: ``[batch, seq]`` of bool.
    """
    most = max(1, int(wanted.sum(dim=1).max()))
    tokens = wanted.sort(dim=1, descending=True, stable=True).indices[:, :most]
    return Choice(tokens, wanted.gather(1, tokens))


class Router(nn.Module):
    """A score for every token: the projection of its vector on one direction (section 3.4).

    Args:
        hidden: width of the stream.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, hidden) * INIT_STD)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to scores ``[batch, seq]`` in float32, so that few are equal."""
        return F.linear(x.float(), self.weight.float()).squeeze(-1)


class Predictor(nn.Module):
    """Guesses from a token alone whether it ranks among the top ones of its sequence (section 3.5).

    Args:
        hidden: width of the stream.
        width: of the middle.
    """

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, width)
        # Without a bias: a parameter of one number would shift all others in ZeRO's flat buffers out of alignment,
        # and then the last bits of a product depend on what else its stage holds.
        self.down = nn.Linear(width, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]``, through which no gradient returns, to logits ``[batch, seq]``."""
        x = F.layer_norm(x.detach(), x.shape[-1:])  # it learns sooner: the stream of a fresh model is small
        return self.down(F.gelu(self.up(x), approximate="tanh")).squeeze(-1).float()
