"""One change of what a stage's optimizer works on: all ranks change, or none does.

Moving layers, replacing parameters and freezing are such changes. Each has the same steps: every rank takes in its
new parameters, all vote; the optimizer's state is filled in, all vote; then what was kept for going back is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import nn

from dynpipe_ds.host.optimizers.groups import State
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.ranks.agreement import together

T = TypeVar("T")


class MigrationError(RuntimeError):
    """A change of layers or parameters failed on some rank; every rank has what it had before."""


def nothing() -> None:
    """Do nothing."""


class Transaction:
    """A change that can be undone on every rank until all have agreed.

    Args:
        optimizer: this stage's; it changes by ``prepare``, which ``take_in`` calls, and by ``fill``.
        device: where the communication back-end works.
        what: is attempted, for messages: ``"changing the partition from ... to ..."``.
    """

    def __init__(self, optimizer: StageOptimizer | None, device: torch.device, what: str) -> None:
        self._optimizer = optimizer
        self._device = device
        self._what = what

    def together(self, action: Callable[[], T]) -> T:
        """Do something on every rank; if it fails on one, fail on all; collective over all ranks.

        Args:
            action: this rank's part, which does not communicate and changes nothing that :meth:`run` would not undo.

        Returns:
            What the action returned.

        Raises:
            MigrationError: on every rank, with the same text, if any rank's action raised.
        """
        return together(action, self._device, self._failure)

    def run(
        self, take_in: Callable[[], object], undo: Callable[[], object], states: Mapping[nn.Parameter, State], *,
        meanwhile: Callable[[], object] = nothing,
    ) -> None:
        """Carry it out; collective over all ranks.

        Args:
            take_in: this rank's part without optimizer state; may run out of memory, does not communicate.
            undo: puts back what ``take_in`` changed outside the optimizer, however far it came.
            states: complete optimizer state of the parameters that come.
            meanwhile: communication that ends between the votes, into memory that nobody uses if the change fails.

        Raises:
            MigrationError: on every rank, with the same text, if any rank could not do its part; all is as before.
        """
        try:
            self._vote_and_fill(take_in, states, meanwhile)
        except MigrationError:
            if self._optimizer is not None:
                self._optimizer.rollback()
            undo()
            raise
        if self._optimizer is not None:
            self._optimizer.commit()

    def _vote_and_fill(
        self, take_in: Callable[[], object], states: Mapping[nn.Parameter, State], meanwhile: Callable[[], object]
    ) -> None:
        refused: MigrationError | None = None
        try:
            self.together(take_in)
        except MigrationError as error:
            refused = error
        meanwhile()
        if refused is not None:
            raise refused
        # It communicates, but only among replicas, which fail together.
        self.together(lambda: self._fill(states))

    def _fill(self, states: Mapping[nn.Parameter, State]) -> None:
        if self._optimizer is not None and self._optimizer.is_changing:
            self._optimizer.fill(states)

    def _failure(self, message: str) -> MigrationError:
        return MigrationError(f"{self._what} failed and was undone on every rank ({message})")
