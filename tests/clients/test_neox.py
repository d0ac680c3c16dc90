"""The shape of GPT-NeoX: a model class that builds its own specs, a tied head, an optimizer made before the engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor, nn

from tests.clients.life import Client, compare
from tests.clients.parts import HIDDEN, LENGTH, VOCABULARY, Block, causal_mask, tokens
from tests.distributed.configs import BY_HAND, UNCLIPPED, ZERO


class EmbeddingPipe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.position_embeddings = nn.Embedding(LENGTH, HIDDEN)

    @property
    def word_embeddings_weight(self) -> Tensor:
        return self.word_embeddings.weight

    def forward(self, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        ids, positions, mask = args
        return self.word_embeddings(ids) + self.position_embeddings(positions), mask


class SoftEmbedding(nn.Module):
    """Put in after the model was built, as a live module."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(HIDDEN) * 0.1)

    def forward(self, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return args[0] + self.prompt, args[1]


class ParallelTransformerLayerPipe(Block):
    def forward(self, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = args
        return self.run(hidden.transpose(0, 1), mask).transpose(0, 1).contiguous(), mask


class NormPipe(nn.LayerNorm):
    pass


def pre_transformer_block(args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return args[0].transpose(0, 1).contiguous(), args[1]


def post_transformer_block(args: tuple[Tensor, Tensor]) -> Tensor:
    return args[0].transpose(0, 1).contiguous()


def cross_entropy(output: Tensor, labels: tuple[Tensor, Tensor], _fp16: bool = False) -> Tensor:
    targets, loss_mask = labels
    losses = nn.functional.cross_entropy(output.view(-1, VOCABULARY), targets.reshape(-1), reduction="none")
    return (losses * loss_mask.reshape(-1)).sum() / loss_mask.sum()


def model_class(base: type) -> type:
    class GPT2ModelPipe(base, nn.Module):  # type: ignore[misc]
        def __init__(self, topology: Any) -> None:
            self.logits_scale = 0.5
            self.saved_topology = topology
            self.specs = self.init_specs()
            super().__init__(
                layers=self.specs, loss_fn=partial(cross_entropy, _fp16=False), topology=topology,
                activation_checkpoint_interval=1, partition_method="type:transformer|mlp",
                checkpointable_layers=["ParallelTransformerLayerPipe"],
            )

        def init_specs(self) -> list[Any]:
            def logits(embedding: EmbeddingPipe, hidden: Tensor) -> Tensor:
                return hidden @ embedding.word_embeddings_weight.t() * self.logits_scale

            return [
                TiedLayerSpec("embed", EmbeddingPipe, tied_weight_attr="word_embeddings_weight"),
                pre_transformer_block,
                *(LayerSpec(ParallelTransformerLayerPipe) for _ in range(4)),
                post_transformer_block,
                LayerSpec(NormPipe, HIDDEN),
                TiedLayerSpec(
                    "embed", EmbeddingPipe, forward_fn=logits, tied_weight_attr="word_embeddings_weight"
                ),
            ]

        def insert_layers(self, layer: nn.Module, index: int) -> None:
            self.specs.insert(index, layer)
            super().__init__(
                layers=self.specs, loss_fn=self.loss_fn, topology=self.saved_topology,
                activation_checkpoint_interval=self.activation_checkpoint_interval,
                partition_method="type:transformer|mlp", checkpointable_layers=["ParallelTransformerLayerPipe"],
            )

    return GPT2ModelPipe


class AnnealingLR:
    """A scheduler of the project's own; it holds the optimizer that the script made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.num_iters = optimizer, 0
        self.step(0)

    def step(self, step_num: int | None = None) -> None:
        self.num_iters = self.num_iters + 1 if step_num is None else step_num
        for group in self.optimizer.param_groups:
            group["lr"] = 0.02 / (1 + self.num_iters)

    def state_dict(self) -> dict[str, Any]:
        return {"num_iters": self.num_iters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step(state["num_iters"])


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    decay: dict[str, Any] = {"params": [], "weight_decay": 0.1}
    no_decay: dict[str, Any] = {"params": [], "weight_decay": 0.0}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                plain = isinstance(module, nn.LayerNorm) or name == "bias"
                (no_decay if plain else decay)["params"].append(parameter)
    return [decay, no_decay]


def batch_fn(data: dict[str, Tensor]) -> Any:
    ids = data["text"]
    positions = torch.arange(LENGTH).expand(len(ids), -1).contiguous()
    loss_mask = (ids[:, 1:] > 1).float()
    return (ids[:, :-1].contiguous(), positions, causal_mask(len(ids))), (ids[:, 1:].contiguous(), loss_mask)


def engine(base: type, more: dict[str, Any], num_stages: int) -> Any:
    deepspeed.runtime.utils.set_random_seed(5)
    replicas = torch.distributed.get_world_size() // num_stages
    topology = PipeModelDataParallelTopology(num_pp=num_stages, num_mp=1, num_dp=replicas)
    model = model_class(base)(topology)
    torch.manual_seed(6)
    model.insert_layers(SoftEmbedding(), 1)
    optimizer = torch.optim.AdamW(two_groups(model), lr=0.02)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 10**9,
        **UNCLIPPED, **more,
        "dynamic_pipeline": BY_HAND,
    }
    built, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=AnnealingLR(optimizer), dist_init_required=False, config=config
    )
    assert type(built.module).__name__ == "GPT2ModelPipe"
    built.set_has_attention_mask(True)
    built.set_batch_fn(batch_fn)
    return built


def batches(replica: int) -> Iterator[dict[str, Tensor]]:
    return ({"text": ids} for ids in tokens(replica))


def evaluate(engine: Any, batches: Iterator[Any]) -> Any:
    loss, logits = engine.eval_batch(batches, return_logits=True)
    assert (logits is not None) == engine.is_last_stage()
    return [loss, logits]


def save(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder, tag="global_step3", client_state={"iteration": 3})


def load(engine: Any, folder: str) -> None:
    path, state = engine.load_checkpoint(folder, load_optimizer_states=True, load_lr_scheduler_states=True)
    assert path is not None and state["iteration"] == 3 and engine.lr_scheduler.num_iters == 3


MOVES = {1: (0, 1, 10), 2: (0, 9, 10), 4: (0, 4, 10), 5: (0, 8, 10)}


def client(more: dict[str, Any]) -> Client:
    return Client(
        partial(engine, more=more, num_stages=2), batches, 2, MOVES, evaluate=evaluate, save=save, load=load,
        deepspeed_forgets=(9,),
    )


def test_neox(tmp_path: Any) -> None:
    compare([client({})], tmp_path)


@pytest.mark.exhaustive
def test_neox_under_zero(tmp_path: Any) -> None:
    compare([client(ZERO)], tmp_path)
