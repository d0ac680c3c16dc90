"""Freezing what has converged, after Egeria (Wang et al., EuroSys 2023).

The differences from the paper, all so that it works across pipeline stages and in short runs, are
listed in ``docs/freezing.md``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.utils.hooks import RemovableHandle

from scenarios.freezing.plasticity import (
    Trend,
    capture_next,
    drop_reference,
    plasticity,
    reference_of,
    take_reference,
)
from scenarios.freezing.prefix import ConvergenceFreezing, too_small
from scenarios.gpt import GPTConfig
from scenarios.scenario import Engine, State


@dataclass(kw_only=True)
class EgeriaFreezing(ConvergenceFreezing):
    """Freeze the longest prefix of layers whose plasticity has settled; more settings in the base class.

    Attributes:
        refresh_every: evaluations after which the reference is taken anew.
        reference_bits: 32 keeps the reference's weights as they are, 8 as int8 with a scale a row.
        window: evaluations for the moving average and for the slope.
        tolerance: a slope is flat below this share of the layer's steepest slope so far.
        patience: flat evaluations in a row before a layer may freeze.
        unfreeze_lr: unfreeze everything when the learning rate is raised to this multiple of the
            lowest one since the first layer froze.
        unfreeze_lr_drop: unfreeze everything when the learning rate has fallen by this factor from the
            highest one since the first layer froze.
    """

    refresh_every: int = 1
    reference_bits: int = 32
    window: int = 4
    tolerance: float = 0.3
    patience: int = 2
    unfreeze_lr: float = 2.0
    unfreeze_lr_drop: float = 10.0
    trends: list[Trend] = field(init=False, default_factory=list)
    _handles: list[RemovableHandle] = field(init=False, default_factory=list)
    _evaluations: int = field(init=False, default=0)
    _lr_range: tuple[float, float] | None = field(init=False, default=None)

    def problems(self) -> list[str]:
        """List what is wrong with the settings."""
        problems = super().problems() + too_small(self, refresh_every=1, window=2, patience=1)
        if self.tolerance <= 0:
            problems.append(f"tolerance={self.tolerance} must be positive")
        if self.reference_bits not in (8, 32):
            problems.append(f"reference_bits={self.reference_bits} must be 8 or 32")
        for name in ("unfreeze_lr", "unfreeze_lr_drop"):
            if getattr(self, name) <= 1:
                problems.append(f"{name}={getattr(self, name)} must be above 1")
        return problems

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
        super().before_batch(engine, batch)
        if not self.due(batch):
            return
        for index, layer in self._by_whole(engine):
            if self._num_frozen <= index < self.limit(engine):
                if reference_of(layer) is None:
                    # A reference as old as the layer itself would answer alike: compare next time.
                    take_reference(layer, bits=self.reference_bits)
                else:
                    self._handles.append(capture_next(layer))

    def after_batch(self, engine: Engine, batch: int) -> None:
        """Evaluate, agree with all ranks, and freeze or unfreeze."""
        super().after_batch(engine, batch)
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

    def _gather(self, engine: Engine) -> tuple[list[float], float]:
        """Collect every layer's plasticity (the mean of its replicas) and the learning rate.

        Of a layer that was cut, the part that has changed most counts. Every rank gets the same rows and adds them in
        rank order, so all ranks hold the same bits.
        """
        wholes = self.whole_layers(engine)
        row = torch.full((len(wholes) + 1,), math.nan, dtype=torch.float64)
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
        found = [math.nan] * self.num_layers(engine)
        for whole, mean in zip(wholes, means, strict=False):
            found[whole] = mean if math.isnan(found[whole]) else max(found[whole], mean)
        return found, means[-1]

    def _by_whole(self, engine: Engine) -> Iterator[tuple[int, nn.Module]]:
        """Local layers with the indices that they would have if none were cut."""
        wholes = self.whole_layers(engine)
        return ((wholes[index], layer) for index, layer in engine.local_layers().items())

    def _decide(self, engine: Engine, lr: float) -> None:
        """Change the frozen prefix, from values that are the same on every rank."""
        if self._num_frozen and self._lr_has_changed(lr):
            self._unfreeze(engine)
            return
        grown, length = max(self._num_frozen + 1, self.first_module), self._num_frozen
        while grown <= self.limit(engine) and self.trends[grown - 1].calm >= self.patience:
            length = grown
            grown += 1
        if length and not self._num_frozen:
            self._lr_range = lr, lr
        self.freeze(engine, length)

    def _lr_has_changed(self, lr: float) -> bool:
        """Say whether the learning rate has risen or fallen far since the first layer froze."""
        low, high = self._lr_range or (lr, lr)
        self._lr_range = low, high = min(low, lr), max(high, lr)
        return lr >= self.unfreeze_lr * low or lr * self.unfreeze_lr_drop <= high

    def _unfreeze(self, engine: Engine) -> None:
        """Train everything again, and forget what was known of convergence."""
        self._lr_range = None
        self.trends = [Trend() for _ in self.trends]
        self.freeze(engine, 0)

    def _refresh(self, engine: Engine) -> None:
        """Renew the references that are old; frozen layers need none."""
        for index, layer in self._by_whole(engine):
            if index < self._num_frozen:
                drop_reference(layer)
            elif self._evaluations % self.refresh_every == 0 and reference_of(layer) is not None:
                take_reference(layer, bits=self.reference_bits)

    def state_dict(self) -> State:
        """Return the trends as well; references are kept with the layers."""
        return super().state_dict() | {
            "trends": [asdict(trend) for trend in self.trends],
            "evaluations": self._evaluations,
            "lr_range": self._lr_range,
        }

    def load_state_dict(self, state: State) -> None:
        """Take them back."""
        super().load_state_dict(state)
        self.trends = [Trend(**trend) for trend in state["trends"]]
        self._evaluations, self._lr_range = state["evaluations"], state["lr_range"]
