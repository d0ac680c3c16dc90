"""The shape of diffusion-pipe: live modules cut by hand, LoRA on a frozen base, an optimizer made after the engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynpipe_ds import DynamicPipelineModule, MigrationError
from tests.clients.life import Client, compare
from tests.clients.parts import HIDDEN, Block, Lora
from tests.distributed.configs import BY_HAND, UNCLIPPED
from tests.distributed.ranks import run_ranks

LATENT = 3
State = tuple[Tensor, Tensor, Tensor]  # hidden, embedded time, mask


class InitialLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(LATENT, HIDDEN)
        self.time = nn.Linear(1, HIDDEN)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> State:
        for tensor in inputs:  # DeepSpeed wants a gradient of every float that crosses a boundary
            tensor.requires_grad_(True)
        latents, t = inputs
        mask = torch.zeros(latents.shape[1], latents.shape[1], dtype=torch.bool)
        return self.enter(latents), torch.tanh(self.time(t)).unsqueeze(1), mask


class TransformerLayer(Block):
    def forward(self, state: State) -> State:
        hidden, time, mask = state
        return self.run(hidden * (1 + time), mask), time, mask


class FinalLayer(nn.Linear):
    def forward(self, state: State) -> Tensor:  # type: ignore[override]
        return super().forward(state[0])


def loss_fn(output: Tensor, label: tuple[Tensor, Tensor]) -> Tensor:
    target, mask = label
    return ((output - target) ** 2 * mask).mean()


def layers() -> list[nn.Module]:
    """The base model, frozen, with adapters; the same on every rank, as if read from a file."""
    torch.manual_seed(3)
    model = nn.ModuleList([InitialLayer(), *(TransformerLayer() for _ in range(4)), FinalLayer(HIDDEN, LATENT)])
    model.requires_grad_(False)
    for layer in list(model)[1:5]:
        layer.attention.qkv, layer.mlp[0] = Lora(layer.attention.qkv), Lora(layer.mlp[0])
    for name, parameter in model.named_parameters():
        parameter.original_name = name
    return list(model)


class DummyOptimizer(torch.optim.Optimizer):
    """For a stage without trainable parameters."""

    def __init__(self) -> None:
        self.state: Any = defaultdict(dict)
        self.param_groups: list[Any] = []

    def step(self, closure: Any = None) -> Any:
        pass


def get_optimizer(parameters: list[Any]) -> torch.optim.Optimizer:
    if len(parameters) == 0:
        return DummyOptimizer()
    return torch.optim.AdamW(parameters, lr=0.02, weight_decay=0.01)


def module_class(base: type) -> type:
    class ManualPipelineModule(base):  # type: ignore[misc,valid-type]
        def __init__(self, *args: Any, manual_partition_split: Any = None, **kwargs: Any) -> None:
            self.manual_partition_split = manual_partition_split
            super().__init__(*args, **kwargs)

        def _partition_layers(self, method: str = "uniform") -> None:
            if method.lower() == "manual":
                self.parts = [0, *self.manual_partition_split, len(self._layer_specs)]
                self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])
            else:
                super()._partition_layers(method)

    return ManualPipelineModule


def without_optimizer(base: type, split: tuple[int, ...] = (2,)) -> Any:
    model = module_class(base)(
        layers=layers(), num_stages=2, partition_method="manual", manual_partition_split=split, loss_fn=loss_fn,
        dynamic_shape=True, activation_checkpoint_interval=1, checkpointable_layers=["TransformerLayer"],
        activation_checkpoint_func=partial(checkpoint, use_reentrant=False),
    )
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 10**9,
        **UNCLIPPED, "dynamic_pipeline": BY_HAND,
    }
    built, *_ = deepspeed.initialize(model=model, config=config)
    return built


def engine(base: type) -> Any:
    built = without_optimizer(base)
    built._support_torch_style_backward = True
    built._configure_optimizer(get_optimizer, [p for p in built.module.parameters() if p.requires_grad])
    optimizer = built.optimizer
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=4)
    built.lr_scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, constant], milestones=[4])
    return built


def batches(replica: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(200 + replica)
    for length in cycle([4, 6, 3, 5, 7]):
        latents, target = (torch.randn(2, length, LATENT, generator=generator) for _ in range(2))
        mask = (torch.rand(2, length, 1, generator=generator) > 0.2).float()
        yield (latents, torch.rand(2, 1, generator=generator)), (target, mask)


def train(engine: Any, batches: Iterator[Any]) -> Tensor:
    engine.reset_activation_shape()
    return engine.train_batch(batches)


def evaluate(engine: Any, batches: Iterator[Any]) -> Any:
    """The loss, and the adapter as it is saved: by ``original_name``, without what is frozen."""
    loss = engine.eval_batch(batches, num_micro_batches=2)
    mine = {p.original_name: p.detach().clone() for p in engine.module.parameters() if p.requires_grad}
    stages: list[Any] = [None] * 2
    torch.distributed.all_gather_object(stages, mine)
    adapter = {**stages[0], **stages[1]}
    assert len(adapter) == 16 and all("up" in name or "down" in name for name in adapter)
    return [loss, *(adapter[name] for name in sorted(adapter))]


def save(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder, client_state={"step": 3}, save_latest=True, exclude_frozen_parameters=True)


def load(engine: Any, folder: str) -> None:
    path, state = engine.load_checkpoint(folder, load_module_strict=False, load_lr_scheduler_states=True)
    assert path is not None and state["step"] == 3


MOVES = {1: (0, 1, 6), 2: (0, 5, 6), 4: (0, 3, 6), 5: (0, 4, 6)}  # at 1 and 5 a stage has nothing to train


def test_diffusion_pipe(tmp_path: Any) -> None:
    compare([Client(engine, batches, 2, MOVES, train, evaluate, save, load)], tmp_path)


# -- what can't work says so ------------------------------------------------------------------


def dummy_without_parameters(parameters: list[Any]) -> torch.optim.Optimizer:
    """A script that looks into what it is given."""
    real = [p for group in parameters for p in (group["params"] if isinstance(group, dict) else [group])]
    return torch.optim.AdamW(real, lr=0.02) if real else DummyOptimizer()


def by_name(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in parameters if "base" not in p.original_name], lr=0.02)


def refusals(_rank: int) -> None:
    engine = without_optimizer(DynamicPipelineModule, split=(1,))
    parameters = [p for p in engine.module.parameters() if p.requires_grad]
    with pytest.raises(MigrationError, match=r"without an optimizer to tell: make it first, in deepspeed"):
        engine.repartition((0, 3, 6))
    with pytest.raises(ValueError, match=r"different kinds of optimizer \(AdamW on rank 1, DummyOptimizer on rank 0\)"):
        engine._configure_optimizer(dummy_without_parameters, parameters)
    with pytest.raises(ValueError, match=r"rank 0: AttributeError: 'dict' object has no attribute 'original_name'"):
        engine._configure_optimizer(by_name, parameters)


def test_optimizers_that_cannot_work_are_refused_on_every_rank() -> None:
    run_ranks(refusals, 2)
