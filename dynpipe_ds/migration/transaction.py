"""One change of what a stage's optimizer works on: all ranks change, or none does.

Moving layers, replacing parameters and freezing are such changes. Each has the same steps: every rank takes in its
new parameters and their optimizer state, all vote; then what was kept for going back is dropped. An optimizer that
copies what travels does so when it has come, and all vote again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import nn

from dynpipe_ds.host.optimizers.groups import State
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.ranks.agreement import together_with_news

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
        return self.together_with_news(lambda: (action(), 0))[0]

    def together_with_news(self, action: Callable[[], tuple[T, int]]) -> tuple[T, int]:
        """As :meth:`together`, and the greatest of the small numbers that the ranks' actions return as well."""
        return together_with_news(action, self._device, self._failure)

    def run(
        self, take_in: Callable[[], object], undo: Callable[[], object], states: Mapping[nn.Parameter, State], *,
        meanwhile: Callable[[], object] = nothing,
    ) -> None:
        """Carry it out; collective over all ranks.

        Args:
            take_in: this rank's part without optimizer state; may run out of memory, does not communicate, and reads
                nothing that still travels.
            undo: puts back what ``take_in`` changed outside the optimizer, however far it came.
            states: complete optimizer state of the parameters that come.
            meanwhile: waits for what travels while ``take_in`` works; into memory that nobody uses if the change fails.

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
        is_filled = True

        def change() -> tuple[None, int]:
            nonlocal is_filled
            take_in()
            is_filled = self._optimizer is None or not (self._optimizer.is_changing and self._optimizer.copies)
            if is_filled:
                self._fill(states)
            return None, int(not is_filled)

        refused: MigrationError | None = None
        some_copy = 0
        try:
            some_copy = self.together_with_news(change)[1]
        except MigrationError as error:
            refused = error
        meanwhile()
        if refused is not None:
            raise refused
        if some_copy:
            self.together(lambda: None if is_filled else self._fill(states))

    def _fill(self, states: Mapping[nn.Parameter, State]) -> None:
        if self._optimizer is not None and self._optimizer.is_changing:
            self._optimizer.fill(states)

    def _failure(self, message: str) -> MigrationError:
        return MigrationError(f"{self._what} failed and was undone on every rank ({message})")
