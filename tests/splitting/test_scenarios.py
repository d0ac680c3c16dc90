"""A block of every scenario, with its own functions, as a stage whose backward is split."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds.splitting.halves import backward_inputs
from scenarios.early_exit.blocks import ExitBlock
from scenarios.early_exit.state import STILL_IN, ExitPlan, ExitState
from scenarios.freezing.gradient_sum import watch_gradients
from scenarios.gpt import Block, GPTConfig
from scenarios.mod import RoutedBlock
from scenarios.moe.layer import ExpertConfig, MoEBlock
from scenarios.pruning import Form, make_prunable, prunable_weights
from scenarios.sparse_attention.attention import HashSparseBlock

CONFIG = GPTConfig(depth=2, hidden=32, heads=2, seq_len=24, vocab_size=32)
Forward = Callable[[Tensor], Any]


def on_stream(block: nn.Module) -> Forward:
    return block


def with_loss(block: nn.Module) -> Forward:
    return lambda x: block((x, x.new_zeros(())))


def pruned(crossover: float, structure: str) -> nn.Module:
    block = Block(CONFIG)
    make_prunable(block, Form(structure, crossover, 8))  # type: ignore[arg-type]
    for linear in prunable_weights(block):
        scores = linear.scores()
        keep = scores.flatten().argsort(descending=True)[: scores.numel() // 4]
        linear.shrink(torch.zeros(scores.numel(), dtype=torch.bool).index_fill(0, keep, True).view_as(scores))
    return block


def exiting(block: nn.Module) -> Forward:
    def run(x: Tensor) -> Any:
        tokens = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) % 32
        exits = torch.full_like(tokens, STILL_IN)
        exits[:, ::3] = 0
        nothing = torch.zeros(*tokens.shape, 1)
        state = block(ExitState(x, tokens, exits, x.new_zeros(()), nothing, nothing.long()))
        return state.stream, state.loss

    return run


def watched(block: nn.Module) -> nn.Module:
    watch_gradients(block, 1)
    return block


PLAN = ExitPlan(
    blocks=(1, 2), loss_weights=(0.5, 1.0), measure="softmax", decay="none", visible=True, audit_every=0  # type: ignore[arg-type]
)
BLOCKS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Forward]]] = {
    "dense": (lambda: Block(CONFIG), on_stream),
    "freezing, watched": (lambda: Block(CONFIG), lambda block: watched(block)),
    "mixture of depths": (lambda: RoutedBlock(CONFIG, LayerSpec(Block, CONFIG), capacity=0.5), with_loss),
    "experts": (lambda: MoEBlock(CONFIG, ExpertConfig(num_experts=4, top_k=2, aux_weight=0.1)), with_loss),
    "pruned, masked": (lambda: pruned(2.0, "unstructured"), on_stream),
    "pruned, in rows": (lambda: pruned(0.0, "unstructured"), on_stream),
    "pruned, in blocks": (lambda: pruned(0.0, "block"), on_stream),
    "sparse attention": (lambda: HashSparseBlock(CONFIG), on_stream),
    "sparse attention, separate": (lambda: HashSparseBlock(CONFIG, hashing="separate"), on_stream),
    "early exit": (lambda: ExitBlock(CONFIG, PLAN), exiting),
}


def backward_of(forward: Forward, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(2)
    value = forward(x)
    outputs = [value] if isinstance(value, Tensor) else list(value)
    wanting = [output for output in outputs if output.requires_grad]
    return wanting, [torch.randn_like(output) for output in wanting]


def bits(tensors: Sequence[Tensor | None]) -> list[bytes | None]:
    return [None if tensor is None else tensor.contiguous().numpy().tobytes() for tensor in tensors]


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_block_in_two_halves(kind: str) -> None:
    make, as_stage = BLOCKS[kind]
    torch.manual_seed(1)
    expected = make()
    block = copy.deepcopy(expected)
    draw = torch.randn(2, CONFIG.seq_len, CONFIG.hidden)
    theirs, ours = draw.clone().requires_grad_(), draw.clone().requires_grad_()
    torch.autograd.backward(*backward_of(as_stage(expected), theirs))
    outputs, gradients = backward_of(as_stage(block), ours)
    half = backward_inputs(outputs, gradients, [ours])
    assert bits([ours.grad]) == bits([theirs.grad])
    assert len(half.run()) > 4, "weights of products are among what waits"
    assert [linear.work.multiply_adds for linear in prunable_weights(block)] == [
        linear.work.multiply_adds for linear in prunable_weights(expected)
    ], "nothing is computed twice"
    assert bits([ours.grad]) == bits([theirs.grad])
    assert bits([p.grad for p in block.parameters()]) == bits([p.grad for p in expected.parameters()])
    assert any(parameter.grad is not None for parameter in block.parameters())
    for name, total in vars(block).items():  # what the freezing scenario has summed
        if isinstance(total, dict) and total and all(isinstance(value, Tensor) for value in total.values()):
            assert bits(list(total.values())) == bits(list(vars(expected)[name].values())), name
