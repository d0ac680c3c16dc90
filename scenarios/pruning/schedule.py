"""When how much is pruned: the cubic schedule of Zhu & Gupta."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CubicSchedule:
    """Sparsity that rises fast at first and slowly at the end.

    Zhu & Gupta, *To prune, or not to prune* (2017), equation 1, which DynMo takes over as equation 3:
    ``s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n Δt)) ** 3`` at ``t = t_0, t_0 + Δt, …, t_0 + n Δt``.

    Attributes:
        start_batch: ``t_0``, the first batch before which the model is pruned.
        end_batch: ``t_0 + n Δt``, the last one.
        every: ``Δt``, batches from one pruning to the next.
        initial_sparsity: ``s_i``, share of the weights that is zero from ``start_batch`` on.
        final_sparsity: ``s_f``, share of the weights that is zero from ``end_batch`` on.
    """

    start_batch: int
    end_batch: int
    every: int
    initial_sparsity: float
    final_sparsity: float

    def problems(self) -> list[str]:
        """List what is wrong with the settings: value, rule, remedy."""
        found = []
        if self.start_batch < 0:
            found.append(f"scenario.start_batch={self.start_batch} must be at least 0")
        if self.every < 1:
            found.append(f"scenario.every={self.every} must be at least 1 batch")
        elif self.end_batch < self.start_batch or (self.end_batch - self.start_batch) % self.every:
            found.append(
                f"scenario.end_batch={self.end_batch} must be start_batch={self.start_batch} plus a multiple of "
                f"every={self.every}: end_batch={self._nearest_end()} is the next one"
            )
        if not 0.0 <= self.initial_sparsity <= self.final_sparsity <= 1.0:
            found.append(
                f"scenario.initial_sparsity={self.initial_sparsity} and scenario.final_sparsity={self.final_sparsity} "
                "must rise within [0, 1], since pruned weights do not come back"
            )
        return found

    def _nearest_end(self) -> int:
        steps = max(0, -(-(self.end_batch - self.start_batch) // self.every))
        return self.start_batch + steps * self.every

    def sparsity(self, batch: int) -> float | None:
        """Return the sparsity to prune to before a batch, or ``None`` if nothing is pruned then.

        Args:
            batch: its index, from 0.
        """
        if not self.start_batch <= batch <= self.end_batch or (batch - self.start_batch) % self.every:
            return None
        if batch == self.end_batch:
            return self.final_sparsity
        remaining = 1.0 - (batch - self.start_batch) / (self.end_batch - self.start_batch)
        return self.final_sparsity + (self.initial_sparsity - self.final_sparsity) * remaining**3
