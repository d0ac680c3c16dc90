"""Which token goes to which expert: pure functions from router scores to an assignment.

Letters: ``T`` tokens, ``E`` experts, ``K`` experts a token, ``N`` rows (pairs of a token and an expert that
computes it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Assignment:
    """Tokens in the order in which experts compute them: all of expert 0, all of expert 1, …

    Attributes:
        token: index of the token of each row, ``[N]``.
        gate: what the expert's answer is multiplied by, float32 ``[N]``, with a gradient to the router.
        counts: rows of each expert, ``[E]``; they add up to ``N``.
        wanted: rows that each expert would have without a capacity, ``[E]``.
        num_missed: how much is left out, a scalar: pairs dropped over capacity, or under expert choice tokens
            that no expert chose.
        num_offered: what ``num_missed`` is a part of: ``T * K`` pairs, or ``T`` tokens.
    """

    token: Tensor
    gate: Tensor
    counts: Tensor
    wanted: Tensor
    num_missed: Tensor
    num_offered: int


def capacity_of(num_tokens: int, *, num_experts: int, top_k: int, factor: float) -> int:
    """Most tokens that one expert computes: ``factor`` times an equal share (Switch Transformer, equation 3).

    Args:
        num_tokens: ``T``, tokens of a micro-batch on one replica.
        num_experts: ``E``.
        top_k: experts a token ``K``; under expert choice the mean of it.
        factor: capacity factor; 0 leaves every token out.

    Returns:
        ``ceil(factor * T * K / E)``, at most ``T``.
    """
    return min(num_tokens, math.ceil(factor * num_tokens * top_k / num_experts))


def count_by_expert(expert: Tensor, num_experts: int) -> Tensor:
    """Count how often each expert occurs: ``[E]`` of int64, without waiting for the device."""
    counts = torch.zeros(num_experts, dtype=torch.int64, device=expert.device)
    return counts.scatter_add_(0, expert, torch.ones_like(expert))


def token_choice(expert: Tensor, gate: Tensor, *, num_experts: int, capacity: int | None) -> Assignment:
    """Arrange the tokens by the experts that they chose.

    With a capacity, an expert takes all first choices before any second one, and among equals the earlier
    token (GShard, Lepikhin et al. 2020, algorithm 1). A token's place then depends on no later one.

    Args:
        expert: experts chosen by each token, the best first, ``[T, K]``.
        gate: their gates, ``[T, K]``.
        num_experts: ``E``.
        capacity: most rows of an expert; ``None`` for dropless.

    Returns:
        The assignment.
    """
    num_tokens, top_k = expert.shape
    chosen = expert.T.flatten()  # all first choices, then all second ones
    wanted = count_by_expert(chosen, num_experts)
    pair = torch.argsort(chosen, stable=True)
    counts = wanted
    if capacity is not None:
        chosen = chosen[pair]
        place = torch.arange(len(pair), device=pair.device) - (wanted.cumsum(0) - wanted)[chosen]
        pair = pair[place < capacity]
        counts = wanted.clamp(max=capacity)
    return Assignment(
        token=pair % num_tokens if num_tokens else pair,
        gate=gate.T.flatten().index_select(0, pair),
        counts=counts,
        wanted=wanted,
        num_missed=(wanted - counts).sum(),
        num_offered=num_tokens * top_k,
    )


def expert_choice(probabilities: Tensor, *, capacity: int) -> Assignment:
    """Let every expert take the tokens with the highest score (Zhou et al. 2022, section 3.2).

    A token may be taken by several experts or by none. Whether it is depends on the tokens after it, too.

    Args:
        probabilities: softmax over experts, ``[T, E]``.
        capacity: tokens that each expert takes.

    Returns:
        The assignment.
    """
    num_tokens, num_experts = probabilities.shape
    gate, token = probabilities.T.topk(capacity, dim=1)
    token = token.flatten()
    taken = torch.zeros(num_tokens, dtype=torch.int64, device=token.device)
    taken.scatter_add_(0, token, torch.ones_like(token))
    counts = torch.full((num_experts,), capacity, dtype=torch.int64, device=token.device)
    return Assignment(
        token=token,
        gate=gate.flatten(),
        counts=counts,
        wanted=counts,
        num_missed=(taken == 0).sum(),
        num_offered=num_tokens,
    )


@torch.no_grad()
def sinkhorn(logits: Tensor, *, num_iterations: int) -> Tensor:
    """Scale the scores so that tokens and experts have equal sums (Sinkhorn-BASE, Clark et al. 2022).

    It solves the entropy-regularised transport from tokens to experts, in the logarithmic domain.

    Args:
        logits: router scores, ``[T, E]``.
        num_iterations: rounds of normalising experts, then tokens.

    Returns:
        Logarithm of the transport plan, ``[T, E]``: each token's row sums to 1, each expert's column to about
        ``T / E``.
    """
    plan = logits - logits.logsumexp(dim=1, keepdim=True)
    for _ in range(num_iterations):
        plan = plan - plan.logsumexp(dim=0, keepdim=True)
        plan = plan - plan.logsumexp(dim=1, keepdim=True)
    return plan


@torch.no_grad()
def balanced(scores: Tensor, *, capacity: int) -> Tensor:
    """Give each token one expert, each expert at most ``capacity`` tokens.

    Tokens go to their best expert that has room; an expert that too many want keeps those with the highest
    scores and is full, the others choose again. With the scores of :func:`sinkhorn` few have to.

    Args:
        scores: ``[T, E]``.
        capacity: with ``E * capacity >= T``; if they are equal, all experts get exactly that many.

    Returns:
        Expert of each token, ``[T]``.
    """
    num_tokens, num_experts = scores.shape
    expert = torch.zeros(num_tokens, dtype=torch.int64, device=scores.device)
    free = torch.full((num_experts,), capacity, dtype=torch.int64, device=scores.device)
    waiting = torch.arange(num_tokens, device=scores.device)
    while len(waiting):
        score, wish = scores[waiting].masked_fill(free == 0, -math.inf).max(dim=1)
        order = score.argsort(descending=True, stable=True)
        order = order[wish[order].argsort(stable=True)]
        wanted = count_by_expert(wish, num_experts)
        wish, waiting = wish[order], waiting[order]
        place = torch.arange(len(wish), device=wish.device) - (wanted.cumsum(0) - wanted)[wish]
        accepted = place < free[wish]
        expert[waiting[accepted]] = wish[accepted]
        free = free - torch.minimum(wanted, free)
        waiting = waiting[~accepted]
    return expert


def load_balancing_loss(probabilities: Tensor, wanted: Tensor, *, top_k: int) -> Tensor:
    """Punish experts that are both likely and busy (Switch Transformer, Fedus et al. 2022, equations 4 to 6).

    Args:
        probabilities: of each token over all experts, ``[T, E]``.
        wanted: tokens that chose each expert, before a capacity, ``[E]``.
        top_k: experts a token; the busy share is taken over all choices (DeepSeek-V3, equations 17 to 20).

    Returns:
        ``E * sum(share of choices * mean probability)``: 1 when balanced, ``E`` when all choose one expert
        with certainty.
    """
    num_tokens, num_experts = probabilities.shape
    share = wanted / max(1, num_tokens * top_k)
    return num_experts * (share * probabilities.sum(0)).sum() / max(1, num_tokens)
