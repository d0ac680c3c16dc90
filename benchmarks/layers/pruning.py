"""A block at the sparsities of the schedule: single weights, and blocks of rows."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.layers.case import Case, Shape, count_operations, forward_backward_s
from scenarios.gpt import Block
from scenarios.pruning import Form, make_prunable, prunable_weights
from scenarios.pruning.linear import Structure
from scenarios.pruning.selection import keep_largest

SHAPE = Shape(hidden=256, heads=4, seq_len=256, batch=2)
POINTS: dict[Structure, tuple[float, ...]] = {
    "unstructured": (0.0, 0.52, 0.75, 0.79, 0.9, 0.95), "block": (0.5, 0.75, 0.9),
}  # fmt: skip


def prune(block: nn.Module, sparsity: float) -> None:
    """Prune every weight of a block to the same sparsity."""
    for weight in prunable_weights(block):
        scores = weight.scores()
        keep = scores.numel() - round(sparsity * scores.numel())
        change = weight.shrink(keep_largest({0: [scores]}, keep, 1, None, scores.device)[0][0][0])
        if change is not None:
            weight.weight = change.replacement.parameter
            change.finish()


def counter(block: nn.Module, activation: torch.Tensor, dense: nn.Module) -> Callable[[], float]:
    """Count multiply-adds of products as they ran, attention's own added, as a share of the dense block's."""
    weights = prunable_weights(block)
    tokens = activation.shape[0] * activation.shape[1]
    of_dense = count_operations(dense, activation) // 2
    elsewhere = of_dense - 3 * tokens * sum(weight.numel for weight in weights)

    def operations() -> float:
        for weight in weights:
            weight.work.take()
        forward_backward_s(block, activation)
        return (elsewhere + sum(weight.work.take() for weight in weights)) / of_dense

    return operations


def cases(shape: Shape = SHAPE) -> list[Case]:
    """List a block at every sparsity."""
    torch.manual_seed(0)
    dense = Block(shape.model())
    activation = torch.randn(shape.batch, shape.seq_len, shape.hidden)
    found = []
    for structure, sparsities in POINTS.items():
        for sparsity in sparsities:
            block = copy.deepcopy(dense)
            make_prunable(block, Form(structure))
            prune(block, sparsity)
            small = sum(weight.is_small for weight in prunable_weights(block))
            found.append(Case(
                amount=f"{sparsity:.0%} {structure}, {small} of 4 small", layer=block, dense=dense,
                activation=activation, dense_activation=activation, operations=counter(block, activation, dense),
            ))  # fmt: skip
    return found
