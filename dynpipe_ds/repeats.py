"""Which forwards of a layer count in a batch, where activation checkpointing repeats them in the backward."""

from __future__ import annotations

import torch


class CountedForwards:
    """Forwards of one layer in one batch: of each micro-batch one counts. Make a new one for every batch.

    Reentrant checkpointing runs the first forward without gradients, so the repeated one counts. Without reentrance
    both have gradients. The first one counts then, outside of any backward.
    """

    def __init__(self) -> None:
        self._outside = False

    def once(self) -> bool:
        """Ask once in each forward.

        Returns:
            Whether the forward that runs counts; never without gradients.
        """
        if not torch.is_grad_enabled():
            return False
        is_outside = torch._C._current_graph_task_id() == -1
        is_repeated = self._outside and not is_outside
        self._outside |= is_outside
        return not is_repeated
