"""What a script does between two batches, so that it can be done again when batches are repeated."""

from __future__ import annotations

from typing import Any, Protocol


class BetweenBatches(Protocol):
    """What changes layers, or anything else that batches depend on, between two of them.

    Given to ``engine.between_batches``, it is called by the engine before and after every batch. When training has to
    go back to a snapshot, it gets the state that it had then, and is called again for the batches that are repeated. On
    a worker that joins, it gets the state of the first rank's.
    """

    def before_batch(self, batch: int) -> None:
        """Act before a batch.

        Args:
            batch: its number, counted from 0; all ranks are about to train it.
        """

    def after_batch(self, batch: int) -> None:
        """Act after a batch.

        Args:
            batch: its number.
        """

    def state_dict(self) -> dict[str, Any]:
        """What it must know to go on that layers do not hold: plain values and tensors."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where :meth:`state_dict` was called.

        Args:
            state: what it gave.
        """
