"""What routers report and what they add to the loss.

A block's router is watched from outside while the block runs, so the blocks are those of
``transformers``. Letters: ``T`` tokens of a micro-batch, ``E`` experts, ``K`` experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.repeats import CountedForwards

_LOAD, _COUNTED = "expert_load", "counted_forwards"


@contextmanager
def watched(router: nn.Module | None) -> Iterator[list[Any]]:
    """Collect what a router returns while the block that holds it runs.

    Args:
        router: the router, or ``None`` for a block without.

    Yields:
        A list that its outputs are appended to.
    """
    outputs: list[Any] = []
    if router is None:
        yield outputs
        return
    handle = router.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def count_by_expert(chosen: Tensor, num_experts: int, weight: Tensor | None = None) -> Tensor:
    """Count how often each expert was chosen.

    Args:
        chosen: experts of every token, ``[T, K]``.
        num_experts: ``E``.
        weight: of each token, ``[T]``; ``None`` for 1.

    Returns:
        ``[E]``, int64 without a weight, else of its type.
    """
    ones = torch.ones_like(chosen) if weight is None else weight[:, None].expand(chosen.shape)
    counts = torch.zeros(num_experts, dtype=ones.dtype, device=chosen.device)
    return counts.scatter_add_(0, chosen.flatten(), ones.flatten())


def note_load(block: nn.Module, chosen: Tensor, num_experts: int) -> None:
    """Count a training micro-batch on the block; only once where the forward is repeated for the backward."""
    if not block.training:
        return
    counted: CountedForwards = getattr(block, _COUNTED, None) or CountedForwards()
    setattr(block, _COUNTED, counted)
    if counted.once():
        counts = count_by_expert(chosen, num_experts)
        load: Tensor | None = getattr(block, _LOAD, None)
        setattr(block, _LOAD, counts if load is None else load + counts)


def take_expert_load(layer: nn.Module) -> Tensor | None:
    """Return how many tokens each expert of a layer was given since the last call, and start anew.

    Args:
        layer: one of ``engine.local_layers()``.

    Returns:
        int64 ``[E]``, of this replica's tokens in training; ``None`` if nothing was routed.
    """
    for module in layer.modules():
        if getattr(module, _COUNTED, None) is not None:
            load: Tensor | None = getattr(module, _LOAD, None)
            setattr(module, _LOAD, None)
            setattr(module, _COUNTED, None)
            return load
    return None


def add_up(total: Tensor, logits: Tensor, padding: Tensor | None, top_k: int) -> Tensor:
    """Add one layer's choices and probabilities to those of the layers before it.

    Mixtral's load-balancing loss is a product of two means over *all* layers, so these two travel.

    Args:
        total: float32 ``[2, E]``: choices of each expert, sum of its probabilities.
        logits: the router's scores, ``[T, E]``.
        padding: ``[batch, seq]``, 0 for tokens that do not count, or ``None``.
        top_k: ``K``.

    Returns:
        The new totals.
    """
    probabilities = logits.softmax(dim=-1)
    chosen = probabilities.topk(top_k, dim=-1).indices
    weight = None if padding is None else padding.flatten().float()
    counts = count_by_expert(chosen, logits.shape[-1], weight)
    sums = probabilities.float() if weight is None else probabilities.float() * weight[:, None]
    return total + torch.stack((counts.float(), sums.sum(dim=0)))


def joint_balance_loss(total: Tensor, num_rows: Tensor | float) -> Tensor:
    """Mixtral's auxiliary loss (Switch Transformer, Fedus et al. 2022, equations 4 to 6, over all layers at once).

    Args:
        total: from :func:`add_up` over all layers.
        num_rows: tokens that counted, summed over the layers.

    Returns:
        ``E * sum(share of choices * mean probability)``, a scalar.
    """
    counts, sums = total[0] / num_rows, total[1] / num_rows
    return torch.sum(counts * sums[None]) * total.shape[1]
