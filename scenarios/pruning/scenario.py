"""Global magnitude pruning while training: which weights, when, and what is reported."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from scenarios.gpt import INIT_STD, MLP, Attention, GPTConfig
from scenarios.kernels import NEVER, in_use
from scenarios.pruning.linear import TASKS, Form, PrunableLinear, Structure
from scenarios.pruning.schedule import CubicSchedule
from scenarios.pruning.selection import Masks, Scores, Threshold, keep_largest
from scenarios.scenario import Engine, Report, Scenario, State, gather_by_layer


class PrunableSpec(LayerSpec):
    """A layer as another spec builds it, with the linear layers of attention and MLP prunable.

    Args:
        spec: builds the layer.
        form: how its weights are pruned.
        init_std: standard deviation of the prunable weights at the start; ``None`` leaves them as they are.
    """

    def __init__(self, spec: LayerSpec, form: Form, *, init_std: float | None = None) -> None:
        super().__init__(spec.typename, *spec.module_args, **spec.module_kwargs)
        self.spec, self.form, self.init_std = spec, form, init_std

    def build(self, log: bool = False) -> nn.Module:
        """Build the layer."""
        layer: nn.Module = self.spec.build(log)
        make_prunable(layer, self.form)
        if self.init_std is not None:
            for linear in prunable_weights(layer):
                nn.init.normal_(linear.weight, std=self.init_std)
        return layer


def make_prunable(layer: nn.Module, form: Form) -> None:
    """Put a :class:`PrunableLinear` in the place of every ``nn.Linear`` of a layer's attention and MLPs.

    Routers and exit classifiers of other scenarios are left alone: they are small, and they steer.
    """
    for parent in [module for module in layer.modules() if isinstance(module, (Attention, MLP))]:
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                # Between the MLP's two products is only an elementwise function.
                hidden = isinstance(parent, MLP) and name == "up"
                setattr(parent, name, PrunableLinear(child, form, feature_major=hidden))


def prunable_weights(layer: nn.Module) -> list[PrunableLinear]:
    """List the linear layers that can be pruned, in module order."""
    return [module for module in layer.modules() if isinstance(module, PrunableLinear)]


@dataclass(kw_only=True)
class Pruning(Scenario):
    """Prune the smallest weights of all blocks, over all stages together, by a cubic schedule.

    DynMo (Wahib et al.), section 3.2.1 and Algorithm 1; schedule of Zhu & Gupta (2017).

    Attributes:
        start_batch: as in :class:`~scenarios.pruning.schedule.CubicSchedule`, like the next four.
        end_batch: last pruning.
        every: batches between two prunings.
        initial_sparsity: share of zeros at the start.
        final_sparsity: share of zeros at the end.
        structure: ``"unstructured"`` for single elements, ``"block"`` for columns of ``block_rows`` rows at a time.
        crossover: sparsity from which a weight is stored and multiplied without its zeros; ``"auto"`` for what is
            faster on the device, ``"never"`` for masks on dense weights.
        block_rows: rows of a block.
        init: weights that training starts from. ``"gpt2"``: those of the dense model. ``"depth_scaled"``: smaller by
            the root of the block's number (Zhang et al., *Improving Deep Transformer with Depth-Scaled Initialization
            and Merged Attention*, 2019, equation 7), so that blocks are pruned unevenly from the start.
    """

    start_batch: int = 2
    end_batch: int = 26
    every: int = 6
    initial_sparsity: float = 0.0
    final_sparsity: float = 0.9
    structure: Structure = "unstructured"
    crossover: float | str = "auto"
    block_rows: int = 128
    init: Literal["gpt2", "depth_scaled"] = "gpt2"
    schedule: CubicSchedule = field(init=False)
    form: Form = field(init=False)
    _counts: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Check the settings."""
        self.schedule = CubicSchedule(
            start_batch=self.start_batch, end_batch=self.end_batch, every=self.every,
            initial_sparsity=self.initial_sparsity, final_sparsity=self.final_sparsity,
        )  # fmt: skip
        problems = self.schedule.problems()
        if self.structure not in ("unstructured", "block"):
            problems.append(f"scenario.structure={self.structure!r} must be 'unstructured' or 'block'")
        if self.init not in ("gpt2", "depth_scaled"):
            problems.append(f"scenario.init={self.init!r} must be 'gpt2' or 'depth_scaled'")
        if self.block_rows < 1:
            problems.append(f"scenario.block_rows={self.block_rows} must be at least 1")
        crossover = {"auto": None, "never": NEVER}.get(str(self.crossover), self.crossover)
        if isinstance(crossover, str) or (crossover not in (None, NEVER) and not 0.0 <= crossover <= 1.0):
            problems.append(f"scenario.crossover={self.crossover!r} must be in [0, 1], or 'auto' or 'never'")
        if problems:
            raise ValueError("; ".join(problems))
        self.form = Form(self.structure, crossover, self.block_rows)  # type: ignore[arg-type]

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        """Make every block prunable, whatever another scenario has made of it before."""
        scaled = self.init == "depth_scaled"
        return [
            spec if isinstance(spec, TiedLayerSpec)
            # The embedding being layer 0, a block's number is its index.
            else PrunableSpec(spec, self.form, init_std=INIT_STD / math.sqrt(max(index, 1)) if scaled else None)
            for index, spec in enumerate(layers)
        ]  # fmt: skip

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Prune as the schedule says."""
        sparsity = self.schedule.sparsity(batch)
        if sparsity is not None:
            prune_globally(engine, sparsity)
            self._counts = None

    def state_dict(self) -> State:
        """What was counted, so that all ranks know it or none does: counting anew takes all of them."""
        return {"counts": self._counts}

    def load_state_dict(self, state: State) -> None:
        """Take it back; earlier versions kept nothing."""
        self._counts = state.get("counts")

    def report(self, engine: Engine) -> Report:
        """Report sparsities, forms of weights, and the multiply-adds of the last batch."""
        if self._counts is None:
            self._counts = _count(engine)
        work = {index: [sum(weight.work.take() for weight in weights)] for index, weights in local_weights(engine)}
        kept, total, num_small, num_weights = self._counts.sum(0).tolist()
        return {
            "sparsity": round(1.0 - kept / max(total, 1), 3),
            "small weights": f"{num_small:.0f} of {num_weights:.0f}",
            "kernel": in_use(TASKS[self.structure], engine) if num_small else "dense",
            "sparsity by layer": [round(1.0 - row[0] / row[1], 4) if row[1] else 0.0 for row in self._counts.tolist()],
            "multiply-adds by layer": [int(row[0]) for row in gather_by_layer(engine, work, 1).tolist()],
        }


def _count(engine: Engine) -> Tensor:
    """By layer: elements kept, elements, weights without zeros, weights; the first two summed over replicas."""
    replicas = _replicas(engine)
    rows = {}
    for index, weights in local_weights(engine):
        num_small = sum(weight.is_small for weight in weights)
        elements = sum(weight.num_kept() for weight in weights), sum(weight.numel for weight in weights)
        rows[index] = (*elements, num_small / replicas, len(weights) / replicas)
    return gather_by_layer(engine, rows, 4)


def local_weights(engine: Engine) -> Iterator[tuple[int, list[PrunableLinear]]]:
    """Go through the local layers in order: index, prunable weights."""
    for index, layer in sorted(engine.local_layers().items()):
        yield index, prunable_weights(layer)


def prune_globally(engine: Engine, sparsity: float) -> None:
    """Prune the smallest weights of the whole model; collective over all ranks, between two batches.

    What is pruned stays pruned: its weight, its gradient and its optimizer state are zero, or not there at all.

    Args:
        engine: holds the local layers.
        sparsity: share of all prunable elements that is zero afterwards, at least; exact for single elements,
            rounded to whole columns of each weight for blocks.

    Raises:
        RuntimeError: if replicas of a stage have different weights.
    """
    weights = dict(local_weights(engine))
    masks = _select(engine, weights, sparsity)
    changes = [
        change
        for layer, mask_of_weight in masks.items()
        for weight, keep in zip(weights[layer], mask_of_weight, strict=True)
        if (change := weight.shrink(keep)) is not None
    ]
    engine.replace_parameters([change.replacement for change in changes])
    for change in changes:
        change.finish()


def _select(engine: Engine, weights: dict[int, list[PrunableLinear]], sparsity: float) -> Masks:
    """Mark the units that stay; every pipeline of replicas decides for itself, and alike."""
    group = engine.mpu.get_pipe_parallel_group() if dist.is_initialized() else None
    scores: Scores = {layer: [weight.scores() for weight in parts] for layer, parts in weights.items()}
    total = torch.tensor(sum(w.num_units() for parts in weights.values() for w in parts), device=engine.device)
    if group is not None:
        dist.all_reduce(total, group=group)
    keep = int(total) - round(sparsity * int(total))
    masks, threshold = keep_largest(scores, keep, engine.partition[-1], group, engine.device)
    _check_replicas(engine, threshold)
    return masks


def _check_replicas(engine: Engine, threshold: Threshold | None) -> None:
    """Refuse to go on if replicas found different thresholds: their weights would be different sets from here on."""
    if _replicas(engine) == 1:
        return
    found = (-1, -1) if threshold is None else (threshold.bits, threshold.num_equal)
    extremes = torch.tensor([*found, *(-value for value in found)], device=engine.device)
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    if extremes[:2].tolist() != (-extremes[2:]).tolist():
        raise RuntimeError(
            f"replicas would prune at different thresholds (this one at bits, ties = {found}): their weights differ; "
            "check that gradients are averaged over the data-parallel ranks"
        )


def _replicas(engine: Engine) -> int:
    return int(engine.mpu.get_data_parallel_world_size()) if dist.is_initialized() else 1
