"""How many batches foretell the next one the best? What they have in common is planned for.

Layers may vary from batch to batch around times that stay: tokens are routed, attention skips other pairs. A plan made
for few batches is then made for their chance. Layers that become faster step by step need the newest batches alone.
Which of the two is the case, past foretellings tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dynpipe_ds.simulation.workload import FloatArray

MANY = (8, 16)
"""Batches that may be combined where the model varies around what stays."""

COMPARED = 6
"""Newest batches whose foretellings are compared."""

_BETTER = 0.97  # times the error of few batches
_OF_LATE = 2  # newest batches that must not say the contrary: a model that has changed is not what it was
_CONTRARY = 1.25  # times the error of few batches


class Window:
    """Compares means as foretellings of the next batch: of few batches, and of many.

    Args:
        few: how many batches a decision combines at least.
    """

    def __init__(self, few: int) -> None:
        self._counts = (few, *(count for count in MANY if count > few))
        self._shares: deque[FloatArray] = deque(maxlen=max(self._counts))
        self._errors: deque[list[float]] = deque(maxlen=COMPARED)  # of each count

    @property
    def many(self) -> int | None:
        """The number of batches that has foretold the newest ones the best, of late, too; ``None``: few."""
        if len(self._errors) < COMPARED:
            return None
        errors = np.array(self._errors)
        all_of_them, of_late = errors.sum(axis=0), errors[-_OF_LATE:].sum(axis=0)
        best = int(all_of_them.argmin())
        is_better = all_of_them[best] < _BETTER * all_of_them[0] and of_late[best] < _CONTRARY * of_late[0]
        return self._counts[best] if is_better else None

    def observe(self, seconds_until: Sequence[float]) -> None:
        """Take in a batch.

        Args:
            seconds_until: seconds of the first 0, 1, … L layers.
        """
        shares = np.diff(seconds_until) / (seconds_until[-1] or 1.0)
        if len(self._shares) > self._counts[0]:
            known = np.array(self._shares)
            means = (known[-count:].mean(axis=0) for count in self._counts)
            self._errors.append([float(np.abs(mean - shares).sum()) for mean in means])
        self._shares.append(shares)

    def restart(self) -> None:
        """Forget all: what was measured so far tells nothing of what comes."""
        self._shares.clear()
        self._errors.clear()

    def state_dict(self) -> dict[str, Any]:
        """All of it, plain values."""
        return {"shares": [shares.tolist() for shares in self._shares], "errors": list(self._errors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; empty from an older checkpoint.
        """
        self._shares = deque(map(np.array, state.get("shares", ())), maxlen=max(self._counts))
        self._errors = deque(map(list, state.get("errors", ())), maxlen=COMPARED)
