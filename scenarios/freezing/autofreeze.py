"""Freezing what changes slowest, after AutoFreeze (Liu, Agarwal and Venkataraman, 2021, arXiv 2102.01386).

The differences from the paper are listed in ``docs/freezing.md``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from scenarios.freezing.gradient_sum import take_norm, watch_gradients
from scenarios.freezing.prefix import ConvergenceFreezing, too_small
from scenarios.scenario import Engine, Report, State, gather_by_layer


def relative_change(before: float, now: float) -> float:
    """Compute how much a gradient norm has changed (AutoFreeze's gradient norm test).

    Args:
        before: norm of the gradients summed over the interval before.
        now: norm of those summed over this interval.

    Returns:
        ``|before - now| / before``; 0 if both are 0, infinite if only ``before`` is.
    """
    if before == 0:
        return 0.0 if now == 0 else math.inf
    return abs(before - now) / before


def first_above(changes: Mapping[int, float], percentile: float) -> int | None:
    """Find the first layer that changes too fast to freeze.

    Args:
        changes: relative change by layer, of the layers that still train.
        percentile: layers below this percentile of the changes may freeze.

    Returns:
        The first layer at or above it, so that all before it may freeze; ``None`` if a change is not finite.
    """
    if not changes or not all(map(math.isfinite, changes.values())):
        return None
    bound = np.percentile(list(changes.values()), percentile)
    return next(layer for layer in sorted(changes) if changes[layer] >= bound)


@dataclass(kw_only=True)
class AutoFreeze(ConvergenceFreezing):
    """Freeze the longest prefix of layers whose gradient norm changes less than others'.

    More settings in the base classes; the layers up to ``first_module`` are judged by the last of them.

    Attributes:
        percentile: a layer may freeze if its change is below this percentile of all that still train.
        summed_batches: batches at the end of each interval whose gradients are summed; ``None`` for all.
        changes: relative change of each layer at the last evaluation; ``None`` where there is none.
    """

    first_batch: int = 2
    evaluate_every: int = 4
    percentile: float = 50.0
    summed_batches: int | None = None
    changes: list[float | None] = field(init=False, default_factory=list)
    _norms: dict[int, float] = field(init=False, default_factory=dict)
    _handles: list[RemovableHandle] = field(init=False, default_factory=list)

    def problems(self) -> list[str]:
        """List what is wrong with the settings."""
        problems = super().problems()
        if not 0 <= self.percentile <= 100:
            problems.append(f"percentile={self.percentile} must be from 0 to 100")
        if self.summed_batches is not None:
            problems += too_small(self, summed_batches=1)
            if self.summed_batches > self.evaluate_every:
                problems.append(
                    f"summed_batches={self.summed_batches} must be at most evaluate_every={self.evaluate_every}"
                )
        return problems

    def left(self, batch: int) -> int | None:
        """Count the batches left until gradients are compared; 0 after this one, ``None`` before the first."""
        if batch < self.first_batch:
            return None
        return self.evaluate_every - 1 - (batch - self.first_batch) % self.evaluate_every

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Watch the gradients of the layers that may freeze."""
        super().before_batch(engine, batch)
        left = self.left(batch)
        if left is None or left >= (self.summed_batches or self.evaluate_every):
            return
        wholes = self.whole_layers(engine)
        for index, layer in engine.local_layers().items():
            if wholes[index] in self._judged(engine):
                self._handles += watch_gradients(layer, engine.gradient_accumulation_steps())

    def after_batch(self, engine: Engine, batch: int) -> None:
        """At the end of an interval: compare gradients, agree with all ranks, and freeze."""
        super().after_batch(engine, batch)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self.left(batch) == 0 and self._judged(engine):
            self._decide(engine, self._gather_norms(engine))

    def _judged(self, engine: Engine) -> range:
        """List the layers that are compared: those that train, without the last; none if no more may freeze."""
        if self._num_frozen >= self.limit(engine):
            return range(0)
        return range(max(self._num_frozen, self.first_module - 1), self.num_layers(engine) - 1)

    def _gather_norms(self, engine: Engine) -> dict[int, float]:
        """Take every layer's norm; collective over all ranks, and the same bits on each."""
        group = engine.mpu.get_data_parallel_group() if dist.is_initialized() else None
        first_replica = group is None or dist.get_rank(group) == 0
        rows = {}
        for index, layer in engine.local_layers().items():
            norm = take_norm(layer, group)
            if norm is not None and first_replica:
                rows[index] = (norm,)
        judged = self._judged(engine)
        table = gather_by_layer(engine, rows, 1)[:, 0].tolist()
        wholes = self.whole_layers(engine)
        return {layer: sum(v for whole, v in zip(wholes, table, strict=True) if whole == layer) for layer in judged}

    def _decide(self, engine: Engine, norms: dict[int, float]) -> None:
        """Grow the frozen prefix, from values that are the same on every rank."""
        changes = {i: relative_change(self._norms[i], norm) for i, norm in norms.items() if i in self._norms}
        self.changes = [changes.get(index) for index in range(self.num_layers(engine))]
        self._norms = norms
        first = first_above(changes, self.percentile)
        length = 0 if first is None else min(first, self.limit(engine))
        if length >= max(self.first_module, self._num_frozen + 1):
            self.freeze(engine, length)

    def report(self, engine: Engine) -> Report:
        """Report the frozen layers, and the changes of gradient norms by layer."""
        return super().report(engine) | {"change of gradient norm by layer": list(self.changes)}

    def state_dict(self) -> State:
        """Return the norms of the last interval as well; the sums of the present one are kept with the layers."""
        return super().state_dict() | {"norms": dict(self._norms), "changes": list(self.changes)}

    def load_state_dict(self, state: State) -> None:
        """Take them back."""
        super().load_state_dict(state)
        self._norms, self.changes = dict(state["norms"]), list(state["changes"])
