"""The shape of Megatron-DeepSpeed's MoE: auxiliary losses go to a function layer that stashes them for the loss."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule
from tests.clients.life import Client, compare
from tests.clients.parts import HIDDEN, VOCABULARY, Block, causal_mask, tokens
from tests.distributed.configs import ADAMW, BY_HAND, UNCLIPPED
from tests.distributed.ranks import run_ranks

State = tuple[Tensor, Tensor]  # hidden, sum of the auxiliary losses so far


def to_float(ids: Tensor) -> Tensor:
    """Where the project converts to half precision; nothing to do here."""
    return ids


class EmbeddingPipe(nn.Embedding):
    def forward(self, ids: Tensor) -> State:
        hidden = super().forward(ids)
        return hidden, hidden.square().mean() * 0.0


class ParallelTransformerLayerPipe(Block):
    """Two experts, every token to the likelier one."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 2)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))

    def forward(self, state: State) -> State:
        hidden, aux = state
        hidden = self.run(hidden, causal_mask(len(hidden)))
        weights = self.gate(hidden).softmax(-1)
        chosen = nn.functional.one_hot(weights.argmax(-1), 2).to(hidden.dtype)
        mixed = sum((chosen * weights)[..., i : i + 1] * self.experts[i](hidden) for i in range(2))
        balance = 2 * (chosen.mean((0, 1)) * weights.mean((0, 1))).sum()
        return hidden + mixed, aux + balance


def cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.view(-1, VOCABULARY), labels.view(-1))


def model_class(base: type) -> type:
    class GPTModelPipe(base):  # type: ignore[misc,valid-type]
        def __init__(self, split: int | None = None, **kwargs: Any) -> None:
            self.split = split
            self.moe_loss = None
            self.last_lm_loss = self.last_moe_loss = torch.zeros(())  # for display
            layers = [
                to_float, LayerSpec(EmbeddingPipe, VOCABULARY, HIDDEN),
                *(LayerSpec(ParallelTransformerLayerPipe) for _ in range(4)), self._calculate_moe_loss,
                LayerSpec(nn.LayerNorm, HIDDEN), LayerSpec(nn.Linear, HIDDEN, VOCABULARY), to_float,
            ]
            kwargs.setdefault("partition_method", "type:transformer")
            super().__init__(layers=layers, loss_fn=self.loss_func, num_stages=2, **kwargs)

        def _partition_layers(self, method: Any = "uniform") -> None:
            super()._partition_layers(method)
            if self.split is not None:
                self.parts = [0, self.split, self._num_layers]
                self._set_bounds(self.parts[self.stage_id], self.parts[self.stage_id + 1])

        def _calculate_moe_loss(self, inputs: State) -> Tensor:
            hidden, aux = inputs
            self.moe_loss = aux * 0.1
            return hidden

        def loss_func(self, output: Tensor, labels: Tensor) -> Tensor:
            loss = cross_entropy(output, labels)
            self.last_lm_loss = loss.clone().detach()
            if self.moe_loss is not None:
                loss = loss + self.moe_loss
                self.last_moe_loss = self.moe_loss.clone().detach()
            return loss

        def get_additional_losses(self) -> Any:
            return OrderedDict({"lm loss": self.last_lm_loss, "moe loss": self.last_moe_loss})

    return GPTModelPipe


def engine(base: type, **kwargs: Any) -> Any:
    deepspeed.runtime.utils.set_random_seed(21)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 10**9,
        **UNCLIPPED, **ADAMW,
        "dynamic_pipeline": BY_HAND,
    }
    return deepspeed.initialize(model=model_class(base)(**kwargs), config=config)[0]


def batches(replica: int) -> Iterator[Any]:
    return ((ids[:, :-1].contiguous(), ids[:, 1:].contiguous()) for ids in tokens(replica))


def train(engine: Any, batches: Iterator[Any]) -> Any:
    loss = engine.train_batch(batches)
    parts = [torch.as_tensor(value) for value in engine.agg_additional_losses.values()]
    assert len(parts) == 2 and torch.allclose(parts[0] + parts[1], loss, rtol=1e-5) and parts[1] > 0
    return [loss, *parts]


MOVES = {1: (0, 1, 10), 2: (0, 6, 10), 4: (0, 3, 10), 5: (0, 5, 10)}


def test_megatron_moe(tmp_path: Any) -> None:
    compare([Client(engine, batches, 2, MOVES, train=train, same_bits=False)], tmp_path)


UNSAFE = (7, 8, 9)


def unsafe_cuts(_rank: int) -> None:
    said = r"cuts at 8, but layer 6 \(_calculate_moe_loss\) sets moe_loss, which loss_func reads, .*at \[7, 8, 9\]"
    with pytest.raises(ValueError, match=said):
        engine(DynamicPipelineModule, split=8)
    ours = engine(DynamicPipelineModule, partition_method="optimal:parameters")
    assert ours.partition[1] <= 6
    for cut in UNSAFE:
        with pytest.raises(ValueError, match=f"cut at {cut}, between layers {cut - 1} and {cut}; that cut is pinned"):
            ours.repartition((0, cut, 10))
    whole = float(ours.train_batch(batches(0)))
    lost = float(engine(PipelineModule, split=8).train_batch(batches(0)))
    assert whole - lost > 0.1, "DeepSpeed trains on without the auxiliary loss"


def test_a_cut_that_would_lose_the_auxiliary_loss_is_refused() -> None:
    run_ranks(unsafe_cuts, 2)


class ExpertLayer(nn.Module):
    """DeepSpeed's own experts: it gives them process groups after they are built, and they keep their last balance."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), num_experts=2, k=2, top2_2nd_expert_sampling=False)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed, balance, _ = self.moe(hidden)
        return hidden + mixed + 0.01 * balance


def train_experts(moves: bool) -> list[float]:
    deepspeed.runtime.utils.set_random_seed(21)
    layers = [LayerSpec(nn.Embedding, VOCABULARY, HIDDEN), *(LayerSpec(ExpertLayer) for _ in range(4)),
              LayerSpec(nn.Linear, HIDDEN, VOCABULARY)]
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 10**9,
        **UNCLIPPED, **ADAMW, "dynamic_pipeline": BY_HAND,
    }
    module = DynamicPipelineModule(layers, loss_fn=cross_entropy, num_stages=2, partition_method="uniform")
    ours = deepspeed.initialize(model=module, config=config)[0]
    data, losses = batches(0), []
    for cut in (2, 4, 3, 3):
        losses.append(float(ours.train_batch(data)))
        if moves and cut != ours.partition[1]:
            ours.repartition((0, cut, 6))
            arrived = [layer for layer in ours.local_layers().values() if isinstance(layer, ExpertLayer)]
            group = deepspeed.utils.groups._get_expert_parallel_group("ep_size_1")
            assert arrived and all(layer.moe.deepspeed_moe.ep_group is group for layer in arrived)
    return losses


def own_experts(_rank: int) -> None:
    assert train_experts(moves=True) == train_experts(moves=False)


def test_layers_with_deepspeeds_own_experts_move() -> None:
    run_ranks(own_experts, 2)
