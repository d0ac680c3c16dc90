"""When to plan: every so many batches, or when the balance has drifted (Pro-Prophet, end of section IV-C)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from scenarios.moe.placing.lanes import Lanes
from scenarios.moe.placing.traffic import as_loads, count_rows


def balance(lanes: Lanes, loads: Any) -> float:
    """Rows of the busiest rank over the mean; 1 is even.

    Args:
        lanes: the placement.
        loads: rows of each source for each expert, ``[R, E]``.

    Returns:
        1 or more; 1 for a batch without a row.

    Raises:
        ValueError: when the placement is for other sizes, or the loads are none.
    """
    table = as_loads(loads)
    lanes.check(*table.shape)
    computed = count_rows(np.array(lanes.owner, dtype=np.int64), table).computed
    mean = float(computed.mean())
    return float(computed.max()) / mean if mean else 1.0


@dataclass
class WhenToPlan:
    """Whether a layer's next batch deserves a plan.

    Args:
        plan_every: batches from one plan to the next.
        drift: plan sooner when the busiest rank over the mean has grown by this share of what it was in the first
            batch after the last plan; ``None``: never sooner.

    Raises:
        ValueError: for less than one batch, or a drift below 0.
    """

    plan_every: int = 1
    drift: float | None = 0.1
    _since: int | None = None
    _balance: float | None = None

    def __post_init__(self) -> None:
        if self.plan_every < 1:
            raise ValueError(f"plan_every={self.plan_every} must be at least 1 batch")
        if self.drift is not None and not 0 <= self.drift < math.inf:
            raise ValueError(f"drift={self.drift} must be 0 or more, such as 0.1, or null to plan by plan_every alone")

    def due(self, balance: float) -> bool:
        """Note a batch that ran, and decide; once a batch, with the same values on every rank.

        Args:
            balance: of :func:`balance`, under the placement that the batch had.

        Returns:
            Whether to plan the next batch. If so the next call is the first one after that plan.
        """
        if self._since is None:
            return self._restart()
        self._since += 1
        if self._balance is None:
            self._balance = balance
        drifted = self.drift is not None and balance > self._balance * (1 + self.drift)
        return self._restart() if drifted or self._since >= self.plan_every else False

    def _restart(self) -> bool:
        self._since, self._balance = 0, None
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: plain numbers."""
        return {"since": self._since, "balance": self._balance}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        Args:
            state: what it returned.
        """
        self._since, self._balance = state["since"], state["balance"]
