"""A block of which some tokens have left: what it saves where they are invisible, and where they stay visible."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.layers.case import Case, Shape, count_operations
from scenarios.early_exit import EarlyExit
from scenarios.early_exit.blocks import ExitBlock
from scenarios.early_exit.state import STILL_IN, ExitState
from scenarios.gpt import Block
from scenarios.scenario import build_layers

SHAPE = Shape(hidden=384, heads=6, seq_len=384, batch=2)


def cases(shape: Shape = SHAPE) -> list[Case]:
    """Offer blocks in which half, a quarter and a tenth of the tokens are left, and one that has an exit."""
    found, model = [], shape.model()
    for left_tokens in ("invisible", "visible"):
        scenario = EarlyExit(first_exit=1, exit_interval=model.depth, left_tokens=left_tokens)
        specs = build_layers(scenario, model)
        found += [_case(shape, specs[2].build(), share, f"{share:.0%} of tokens, others {left_tokens}")
                  for share in (1.0, 0.75, 0.5, 0.25, 0.1)]  # fmt: skip
    found.append(_case(shape, _WithLoss(specs[1].build()), 1.0, "100% of tokens, and an exit"))
    return found


class _WithLoss(nn.Module):
    """A block with an exit whose loss takes part in the backward as well."""

    def __init__(self, block: ExitBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, activation: ExitState) -> Tensor:
        state: ExitState = self.block(activation)
        return state.stream + state.loss


def _case(shape: Shape, layer: nn.Module, share: float, amount: str) -> Case:
    """Time a block of which a random share of the tokens is active, in rows of different lengths."""
    torch.manual_seed(0)
    dense = Block(shape.model())
    stream = torch.randn(shape.batch, shape.seq_len, shape.hidden)
    left = torch.randperm(stream[..., 0].numel())[round(share * stream[..., 0].numel()):]
    exits = torch.full((stream[..., 0].numel(),), STILL_IN).index_fill(0, left, 0).view(shape.batch, shape.seq_len)
    slots = (shape.batch, shape.seq_len, 1)
    state = ExitState(
        stream=stream, tokens=torch.randint(shape.model().vocab_size, exits.shape), exits=exits,
        loss=torch.zeros((), dtype=torch.float32), confidences=torch.zeros(slots, dtype=torch.float32),
        predictions=torch.zeros(slots, dtype=torch.int64),
    )  # fmt: skip
    dense_operations = count_operations(dense, stream)
    return Case(amount, layer, dense, state, stream,
                lambda: count_operations(layer, state) / dense_operations)  # fmt: skip
