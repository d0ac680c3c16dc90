"""The shape of transpeeder: a class that DeepSpeed knows by name, (hidden, int positions, bool mask) between layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from tests.clients.life import Client, compare
from tests.clients.parts import HIDDEN, LENGTH, VOCABULARY, Block, causal_mask, tokens
from tests.distributed.configs import ADAMW, BY_HAND, UNCLIPPED, WARMUP
from tests.matrix import mostly

State = tuple[Tensor, Tensor, Tensor]


class EmbeddingPipe(nn.Embedding):
    def forward(self, args: State) -> State:  # type: ignore[override]
        ids, positions, mask = args
        return super().forward(ids), positions, mask


class ParallelTransformerLayerPipe(Block):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, HIDDEN)

    def forward(self, args: State) -> State:
        hidden, positions, mask = args
        return self.run(hidden + self.places(positions), mask), positions, mask


class LayerNormPipe(nn.LayerNorm):
    def forward(self, args: State) -> tuple[Tensor]:  # type: ignore[override]
        return (super().forward(args[0]),)


class LMLayerPipe(nn.Linear):
    def forward(self, args: Any) -> tuple[Tensor]:
        # Under activation checkpointing DeepSpeed takes a tuple of one apart.
        return (super().forward(args[0] if isinstance(args, tuple) else args),)


def loss_fn(outputs: tuple[Tensor], labels: Tensor) -> Tensor:
    (logits,) = outputs
    return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def model_class(base: type) -> type:
    class GPT2ModelPipe(base):  # type: ignore[misc,valid-type]
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(
                layers=[
                    LayerSpec(EmbeddingPipe, VOCABULARY, HIDDEN),
                    *(LayerSpec(ParallelTransformerLayerPipe) for _ in range(5)),
                    LayerSpec(LayerNormPipe, HIDDEN), LayerSpec(LMLayerPipe, HIDDEN, VOCABULARY, bias=False),
                ],
                activation_checkpoint_interval=1, checkpointable_layers=["ParallelTransformerLayerPipe"], **kwargs,
            )

    return GPT2ModelPipe


def engine(base: type, num_stages: int) -> Any:
    deepspeed.runtime.utils.set_random_seed(42)
    topology = PipeModelDataParallelTopology(num_pp=num_stages, num_mp=1, num_dp=1)
    model = model_class(base)(loss_fn=loss_fn, topology=topology, base_seed=42)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 10**9,
        **UNCLIPPED, **ADAMW, **WARMUP,
        "dynamic_pipeline": BY_HAND,
    }
    built, *_ = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], config=config
    )
    return built


def batches(replica: int) -> Iterator[Any]:
    for ids in tokens(replica):
        positions = torch.arange(LENGTH).expand(len(ids), -1).contiguous()
        yield (ids[:, :-1].contiguous(), positions, causal_mask(len(ids))), ids[:, 1:].contiguous()


MOVES = {
    2: {1: (0, 1, 8), 2: (0, 7, 8), 4: (0, 3, 8), 5: (0, 6, 8)},
    3: {1: (0, 1, 2, 8), 2: (0, 5, 7, 8), 4: (0, 2, 6, 8), 5: (0, 4, 5, 8)},
}


@pytest.mark.parametrize("num_stages", mostly([2, 3], [3]))
def test_transpeeder(num_stages: int, tmp_path: Any) -> None:
    compare([Client(partial(engine, num_stages=num_stages), batches, num_stages, MOVES[num_stages])], tmp_path)
