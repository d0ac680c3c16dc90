"""Freezing what has converged, after Egeria (Wang et al., EuroSys 2023).

The differences from the paper, all so that it works across pipeline stages and in short runs, are
listed in ``docs/freezing.md``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch.utils.hooks import RemovableHandle

from scenarios.freezing.plasticity import (
    Trend,
    capture_next,
    drop_reference,
    plasticity,
    reference_of,
    take_reference,
)
from scenarios.freezing.prefix import FreezingScenario, freeze_prefix
from scenarios.gpt import GPTConfig
from scenarios.scenario import Engine


@dataclass(kw_only=True)
class EgeriaFreezing(FreezingScenario):
    """Freeze the longest prefix of layers whose plasticity has settled.

    Attributes:
        first_batch: no evaluation before this batch.
        evaluate_every: batches between two evaluations.
        refresh_every: evaluations after which the reference is taken anew.
        window: evaluations for the moving average and for the slope.
        tolerance: a slope is flat below this share of the layer's steepest slope so far.
        patience: flat evaluations in a row before a layer may freeze.
        first_module: leading layers that freeze together, judged by the last of them. By default
            the embedding goes with the first block: a table's answer changes by little from the
            start, but it never stops changing, so it would hold up all others.
        max_frozen: most of the model that may freeze, a fraction of its layers.
        unfreeze_lr: unfreeze everything when the learning rate is raised to this multiple of the
            lowest one since the first layer froze.
    """

    first_batch: int = 6
    evaluate_every: int = 2
    refresh_every: int = 1
    window: int = 4
    tolerance: float = 0.3
    patience: int = 2
    first_module: int = 2
    max_frozen: float = 0.75
    unfreeze_lr: float = 2.0
    trends: list[Trend] = field(init=False, default_factory=list)
    _handles: list[RemovableHandle] = field(init=False, default_factory=list)
    _evaluations: int = field(init=False, default=0)
    _lowest_lr: float = field(init=False, default=math.inf)

    def __post_init__(self) -> None:
        """Refuse settings without a meaning, all problems at once."""
        least = {"first_batch": 0, "evaluate_every": 1, "refresh_every": 1, "window": 2}
        least |= {"patience": 1, "first_module": 1}
        problems = [
            f"{name}={getattr(self, name)} must be at least {bound}"
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]
        if self.tolerance <= 0:
            problems.append(f"tolerance={self.tolerance} must be positive")
        if not 0 < self.max_frozen < 1:
            problems.append(f"max_frozen={self.max_frozen} must be between 0 and 1")
        if self.unfreeze_lr <= 1:
            problems.append(f"unfreeze_lr={self.unfreeze_lr} must be above 1")
        if problems:
            raise ValueError("scenario: " + "; ".join(problems))

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        """Build the layers; each gets a trend."""
        specs = super().layers(model, layers)
        self.trends = [Trend() for _ in specs]
        return specs

    def due(self, batch: int) -> bool:
        """Say whether plasticity is evaluated in this batch."""
        return batch >= self.first_batch and (batch - self.first_batch) % self.evaluate_every == 0

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Take the first references, and listen in on the layers where an evaluation is due."""
        if not self.due(batch):
            return
        for index, layer in engine.local_layers().items():
            if self._num_frozen <= index < self._limit(engine):
                if reference_of(layer) is None:
                    # A reference as old as the layer itself would answer alike: compare next time.
                    take_reference(layer)
                else:
                    self._handles.append(capture_next(layer))

    def after_batch(self, engine: Engine, batch: int) -> None:
        """Evaluate, agree with all ranks, and freeze or unfreeze."""
        if not self.due(batch):
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        measured, lr = self._gather(engine)
        for trend, value in zip(self.trends, measured, strict=True):
            if not math.isnan(value):
                trend.add(value, window=self.window, tolerance=self.tolerance)
        self._evaluations += 1
        self._decide(engine, lr)
        self._refresh(engine)

    def _limit(self, engine: Engine) -> int:
        """Return how many leading layers may freeze at most; the last layer never does."""
        total = engine.partition[-1]
        return min(int(self.max_frozen * total), total - 1)

    def _gather(self, engine: Engine) -> tuple[list[float], float]:
        """Collect every layer's plasticity (the mean of its replicas) and the learning rate.

        Every rank gets the same rows and adds them in rank order, so all ranks hold the same bits.
        """
        row = torch.full((engine.partition[-1] + 1,), math.nan, dtype=torch.float64)
        for index, layer in engine.local_layers().items():
            value = plasticity(layer)
            if value is not None:
                row[index] = value
        # A stage that is frozen altogether may have no parameter group left, hence no rate.
        row[-1] = max(engine.get_lr(), default=math.nan)
        rows = [row]
        if dist.is_available() and dist.is_initialized():
            row = row.to(engine.device)
            rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, row)
        means = torch.stack([other.cpu() for other in rows]).nanmean(dim=0).tolist()
        return means[:-1], means[-1]

    def _decide(self, engine: Engine, lr: float) -> None:
        """Change the frozen prefix, from values that are the same on every rank."""
        if self._num_frozen:
            self._lowest_lr = min(self._lowest_lr, lr)
            if lr >= self.unfreeze_lr * self._lowest_lr:
                self._unfreeze(engine)
                return
        limit = self._limit(engine)
        grown = max(self._num_frozen + 1, self.first_module)
        while grown <= limit and self.trends[grown - 1].calm >= self.patience:
            self._num_frozen = grown
            self._lowest_lr = min(self._lowest_lr, lr)
            grown += 1
        freeze_prefix(engine, self._num_frozen)

    def _unfreeze(self, engine: Engine) -> None:
        """Train everything again, and forget what was known of convergence."""
        self._num_frozen = 0
        self._lowest_lr = math.inf
        self.trends = [Trend() for _ in self.trends]
        freeze_prefix(engine, 0)

    def _refresh(self, engine: Engine) -> None:
        """Renew the references that are old; frozen layers need none."""
        for index, layer in engine.local_layers().items():
            if index < self._num_frozen:
                drop_reference(layer)
            elif self._evaluations % self.refresh_every == 0 and reference_of(layer) is not None:
                take_reference(layer)
