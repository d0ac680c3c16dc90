"""Small models and runs that the multi-process tests share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule
from tests.distributed.configs import BY_HAND, TORCH_ADAMW

VOCABULARY, HIDDEN, LENGTH = 17, 16, 6


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN) * 0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        return nn.functional.embedding(tokens, self.weight)


def as_head(module: Embed, x: Tensor) -> Tensor:
    return x @ module.weight.t()


class Block(nn.Module):
    def __init__(self, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, width)
        self.down = nn.Linear(width, HIDDEN)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def double(x: Tensor) -> Tensor:
    """A layer without parameters."""
    return x * 2.0


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float().view(-1, VOCABULARY), labels.view(-1))


@dataclass(frozen=True)
class Run:
    """One training run: what is built, how it is trained, where the boundaries go when."""

    num_stages: int
    num_batches: int = 8
    num_blocks: int = 6
    tied: bool = False
    dropout: float = 0.0
    checkpoint_interval: int = 0
    functions: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    client: str | None = None  # name of a function in `clients`
    moves: dict[int, tuple[int, ...]] = field(default_factory=dict)  # batch -> boundaries before it
    first: tuple[int, ...] | None = None
    plain: bool = False  # DeepSpeed's own PipelineModule
    micro_batches: int = 4
    special: dict[int, type] = field(default_factory=dict)  # block -> a class that stands in its place
    width: int = 16  # of the narrowest block; odd ones leave parameters that fill no vector register


def layers_of(run: Run) -> list[Any]:
    first: Any = TiedLayerSpec("embed", Embed, tied_weight_attr="weight") if run.tied else LayerSpec(Embed)
    last: Any = (
        TiedLayerSpec("embed", Embed, forward_fn=as_head, tied_weight_attr="weight")
        if run.tied else LayerSpec(Head)
    )
    blocks: list[Any] = [
        LayerSpec(run.special[i]) if i in run.special else LayerSpec(Block, run.width * (1 + i % 3), run.dropout)
        for i in range(run.num_blocks)
    ]
    if run.functions:
        blocks.insert(1, double)
        blocks.insert(4, double)
    return [first, *blocks, last]


def base_config(run: Run, replicas: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": run.micro_batches,
        "steps_per_print": 10**9,
        "dynamic_pipeline": {**BY_HAND, "enabled": not run.plain},
    }
    if run.client is None:
        config |= TORCH_ADAMW
    return {**config, **run.config}


def data(replica: int, micro_batches: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(100 + replica)
    while True:
        tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


CLIENTS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {}


def client(function: Callable[[nn.Module], dict[str, Any]]) -> Callable[[nn.Module], dict[str, Any]]:
    CLIENTS[function.__name__] = function
    return function


def make_module(run: Run, **kwargs: Any) -> PipelineModule:
    torch.manual_seed(7)
    cls = PipelineModule if run.plain else DynamicPipelineModule
    if run.first is not None and not run.plain:
        kwargs.setdefault("partition_method", list(run.first))
    kwargs.setdefault("partition_method", "uniform")
    kwargs.setdefault("num_stages", run.num_stages)
    module = cls(
        layers_of(run), loss_fn=loss_fn, seed_layers=True,
        activation_checkpoint_interval=run.checkpoint_interval, **kwargs,
    )
    return module


def make_engine(run: Run, **kwargs: Any) -> Any:
    import tests.distributed.clients  # noqa: F401 - registers them

    if "fp16" in run.config:
        # DeepSpeed refuses fp16 on most CPUs because it is slow there; torch computes it all the same.
        get_accelerator().is_fp16_supported = lambda: True
    module = make_module(run, **kwargs)
    replicas = torch.distributed.get_world_size() // run.num_stages
    extra = CLIENTS[run.client](module) if run.client else {}
    engine, *_ = deepspeed.initialize(model=module, config=base_config(run, replicas), **extra)
    return engine


def train(engine: Any, run: Run, on_batch: Callable[[Any, int], None] | None = None) -> list[float]:
    """Losses of the run, as exact floats."""
    batches = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    losses = []
    for batch in range(run.num_batches):
        if batch in run.moves:
            engine.repartition(run.moves[batch])
        if on_batch is not None:
            on_batch(engine, batch)
        losses.append(float(engine.train_batch(batches)))
    return losses


def digest(engine: Any) -> dict[str, str]:
    """A hash of every weight, buffer and piece of optimizer state on this rank, by layer."""
    found = {}
    for layer, module in engine.local_layers().items():
        h = hashlib.sha256()
        for name, tensor in sorted(module.state_dict().items()):
            h.update(name.encode())
            if not isinstance(tensor, Tensor):  # get_extra_state()
                h.update(repr(tensor).encode())
                continue
            h.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        for name, parameter in sorted(module.named_parameters()):
            state = engine.stage_optimizer.export([parameter])[0] if engine.stage_optimizer else {}
            for key, value in sorted(state.items()):
                h.update(f"{name}.{key}".encode())
                value = value if isinstance(value, Tensor) else torch.tensor(float(value or 0))
                h.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found[f"layer {layer}"] = h.hexdigest()
    return found


def run_and_digest(_rank: int, run: Run) -> tuple[list[float], dict[str, str], list[float]]:
    """Train; give back losses, digests of this rank's layers, and learning rates."""
    engine = make_engine(run)
    losses = train(engine, run)
    rates = engine.get_lr() if engine.lr_scheduler is None else list(engine.lr_scheduler.get_last_lr())
    return losses, digest(engine), rates
