"""A block with experts against a block that computes all of them, and against a plain block of the same active size.

Amounts "of 8" are compared with the dense mixture: all eight experts on all tokens, mixed by the router. Those that
end in "of a dense MLP" are compared with the plain block whose one MLP is as wide as the experts that a token uses.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.layers.case import Case, Shape, count_operations
from scenarios.gpt import Block, GPTConfig
from scenarios.moe import ExpertConfig, MoEBlock, MoEMLP

SHAPE, NUM_EXPERTS = Shape(hidden=256, heads=4, seq_len=256, batch=2), 8


class DenseMixture(MoEMLP):
    """All experts compute all tokens; the router's probabilities mix them."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to the same shape."""
        gates = F.linear(x, self.router.weight).softmax(dim=-1).unbind(-1)
        experts = zip(gates, self.up.unbind(0), self.down.unbind(0), strict=True)
        answers = [
            gate[..., None] * F.linear(F.gelu(F.linear(x, up), approximate="tanh"), down) for gate, up, down in experts
        ]
        return torch.stack(answers).sum(0)


class DenseMixtureBlock(MoEBlock):
    """A block with the dense mixture in the place of its MLP."""

    def make_mlp(self, config: GPTConfig) -> nn.Module:
        """Build router and experts."""
        return DenseMixture(config, self._experts)


def _case(shape: Shape, amount: str, dense: nn.Module, settings: ExpertConfig) -> Case:
    torch.manual_seed(1)
    layer, x = MoEBlock(shape.model(), settings), torch.randn(shape.batch, shape.seq_len, shape.hidden)
    return Case(
        amount=amount, layer=layer, dense=dense, activation=x, dense_activation=x,
        operations=lambda: count_operations(layer, x) / count_operations(dense, x),
    )  # fmt: skip


def cases(shape: Shape = SHAPE) -> list[Case]:
    """List the routings, dropless and with a capacity."""
    model = shape.model()
    mixture = DenseMixtureBlock(model, ExpertConfig(num_experts=NUM_EXPERTS))
    points: dict[str, ExpertConfig] = {
        "all 8 of 8": ExpertConfig(top_k=8),
        "top-4 of 8": ExpertConfig(top_k=4),
        "top-2 of 8": ExpertConfig(top_k=2),
        "top-2 of 8, capacity 1": ExpertConfig(top_k=2, capacity_factor=1.0),
        "top-2 of 8, capacity 0.5": ExpertConfig(top_k=2, capacity_factor=0.5),
        "loss-free, top-2 of 8": ExpertConfig(top_k=2, routing="loss_free"),
        "expert choice, 2 of 8": ExpertConfig(top_k=2, routing="expert_choice"),
        "top-1 of 8": ExpertConfig(top_k=1),
        "S-BASE, 1 of 8": ExpertConfig(top_k=1, routing="s_base"),
    }
    found = [_case(shape, amount, mixture, settings) for amount, settings in points.items()]
    for top_k in (1, 2):
        wide = Block(replace(model, mlp_ratio=4 * top_k))
        found.append(_case(shape, f"top-{top_k}, of a dense MLP", wide, ExpertConfig(top_k=top_k)))
    return found
