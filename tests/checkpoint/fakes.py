"""One stage of a small model, and the files that DeepSpeed would write for it; no DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from dynpipe_ds.host.optimizers.groups import ParameterGroups
from dynpipe_ds.host.optimizers.stage_optimizer import PlainOptimizer
from dynpipe_ds.owning import Replica
from tests.one_rank import CPU, Calls, FakeRun, Guard


class Writer:
    """DeepSpeed's checkpoint engine."""

    def __init__(self) -> None:
        self.fails: Exception | None = None

    def is_decoupled(self) -> bool:
        return False

    def create(self, info: Any) -> None:
        pass

    def save(self, state: Any, path: str) -> None:
        if self.fails is not None:
            raise self.fails
        torch.save(state, path)

    def commit(self, info: Any) -> None:
        pass


class Host:
    """What is asked of DeepSpeed's engine: where its files are, and that it writes them."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.checkpoint_engine: Any = Writer()
        self.grid = SimpleNamespace(get_slice_parallel_world_size=lambda: 1)
        self.module = SimpleNamespace(_local_start=0, ckpt_layer_path=self._layer_path)
        self.has_moe_layers = self.save_zero_checkpoint = self.node_local = False
        self.optimizer = self.lr_scheduler = self.training_dataloader = None
        self.stage_optimizer = stage.optimizer
        self.global_steps, self.global_samples, self.skipped_steps = 3, 48, 1

    def use_node_local_storage(self) -> bool:
        return self.node_local

    def zero_nvme_offload_optimizer(self) -> bool:
        return False

    def random_ltd_enabled(self) -> bool:
        return False

    def train_batch_size(self) -> int:
        return 16

    def _layer_path(self, folder: str, layer: int) -> str:
        return f"{folder}/layer_{layer:02d}-model_states.pt"

    def _get_ckpt_name(self, save_dir: str, tag: str) -> str:
        return f"{save_dir}/{tag}/mp_rank_00_model_states.pt"

    def _save_checkpoint(
        self, save_dir: str, tag: str, *, client_state: dict[str, Any], exclude_frozen_parameters: bool
    ) -> None:
        for i, layer in self._stage.layers.items():
            self.checkpoint_engine.save(layer.state_dict(), self._layer_path(f"{save_dir}/{tag}", i))
        self.checkpoint_engine.save({
            "module": None, "optimizer": self._stage.optimizer.groups.optimizer.state_dict(), "lr_scheduler": None,
            "global_steps": self.global_steps, "global_samples": self.global_samples,
            "skipped_steps": self.skipped_steps, "dp_world_size": 1, "mp_world_size": 1, **client_state,
        }, self._get_ckpt_name(save_dir, tag))  # fmt: skip


class Stage:
    """All layers of a model of one stage, or those of the first of several.

    Args:
        sizes: of its linear layers.
        num_stages: how many stages it says that there are.
    """

    def __init__(self, sizes: tuple[int, ...] = (3, 4, 2), num_stages: int = 1) -> None:
        self.calls: Calls = []
        self.layers: dict[int, nn.Module] = {
            i: nn.Linear(*pair) for i, pair in enumerate(zip(sizes, sizes[1:], strict=False))
        }
        self.num_stages, self.stage_id, self.device = num_stages, 0, CPU
        self.partition = (0, *(len(self.layers),) * num_stages)
        self.guard = Guard(self.calls)
        self.has_news = False
        adam = torch.optim.Adam([p for layer in self.layers.values() for p in layer.parameters()], lr=0.1)
        self.optimizer = PlainOptimizer(None, ParameterGroups(adam, device=CPU, dtype=torch.float32))
        self.counters = {"micro_offset": 5, "micro_steps": 12}
        self.host = Host(self)
        self.pipeline: Any = SimpleNamespace(
            engine=self.host, replica=0, name_parameters=lambda: None, name_of=lambda parameter: "",
            micro_batch_counters=lambda: dict(self.counters),
            set_micro_batch_counters=lambda stored: self.counters.update({k: stored[k] for k in self.counters}),
            num_steps=3,
        )
        self.module: Any = SimpleNamespace(
            layer_names=lambda: ["Linear"] * len(self.layers), whole_layers=lambda: tuple(range(len(self.layers))),
            local_indices=lambda: list(self.layers),
            local_layers=lambda: self.layers, forward_funcs=list(self.layers.values()),
            _layer_specs=list(self.layers.values()), _synchronize_tied_weights=lambda: None,
            owned={}, replica=Replica(),
        )

    def local_layers(self) -> dict[int, nn.Module]:
        return self.layers

    def settle(self) -> None:
        self.calls.append(("settle",))

    def step(self) -> None:
        """Change weights and optimizer state."""
        optimizer = self.optimizer.groups.optimizer
        for layer in self.layers.values():
            for parameter in layer.parameters():
                parameter.grad = torch.rand_like(parameter)
        optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        """A copy of weights and moments, by name."""
        known = self.optimizer.groups.optimizer.state
        named = {f"{i}.{name}": p for i, layer in self.layers.items() for name, p in layer.named_parameters()}
        moments = {f"{name} {key}": value for name, p in named.items() for key, value in known[p].items()}
        return {name: value.detach().clone() for name, value in {**named, **moments}.items()}


def make_run(stage: Stage | None = None, **section: Any) -> FakeRun:
    """A run whose optimizer has stepped."""
    run = FakeRun(stage or Stage(), **section)
    run.stage.step()
    return run


def files_of(folder: Path) -> dict[str, bytes]:
    """Content of all files of a folder, by path."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
