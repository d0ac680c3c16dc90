"""One change of what a stage's optimizer works on: all ranks change, or none does.

Moving layers, replacing parameters and freezing are such changes. Each has the same steps: every rank takes in its
new parameters while their weights and optimizer state travel, and all vote; when everything has come, what was kept
for going back is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
from torch import nn

from dynpipe_ds.host.optimizers.groups import State
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.migration.transport import Transfer
from dynpipe_ds.ranks.agreement import together_with_news

T = TypeVar("T")

_LATER = 1


class MigrationError(RuntimeError):
    """A change of layers or parameters failed on some rank; every rank has what it had before."""


class NotYet(Exception):  # noqa: N818 - it is no error
    """A change has to wait on some rank for something else, so that no rank makes it."""


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
            NotYet: on every rank, if it was this that some rank's action raised, and no action anything else.
        """
        def act() -> tuple[T | None, int]:
            try:
                return action(), 0
            except NotYet:
                return None, _LATER

        result, news = together_with_news(act, self._device, self._failure)
        if news == _LATER:
            raise NotYet
        return cast(T, result)

    def run(
        self, take_in: Callable[[], object], undo: Callable[[], object], states: Mapping[nn.Parameter, State], *,
        journey: Transfer | None = None,
    ) -> None:
        """Carry it out; collective over all ranks.

        Args:
            take_in: this rank's part without optimizer state; may run out of memory, does not communicate, and reads
                nothing that still travels.
            undo: puts back what ``take_in`` changed outside the optimizer, however far it came.
            states: complete optimizer state of the parameters that come.
            journey: what travels meanwhile, started; into memory that nobody uses if the change fails.

        Raises:
            MigrationError: on every rank, with the same text, if any rank could not do its part; all is as before.
            NotYet: on every rank, if it was this that some ``take_in`` raised; all is as before.
        """
        journey = journey or Transfer({}, {}, buffer_bytes=1, device=self._device)
        failure: Exception | None = None
        try:
            take_in()
            if self._optimizer is not None and self._optimizer.is_changing:
                self._optimizer.fill(states)
        except Exception as error:  # noqa: BLE001 - whatever it is, others wait for what this rank sends
            failure = error
        journey.send_rest()
        failure = failure or journey.reading_failure()  # after the vote, others change what they offer

        def check() -> None:
            if failure is not None:
                raise failure

        refused: MigrationError | NotYet | None = None
        try:
            self.together(check)
        except (MigrationError, NotYet) as error:
            refused = error
        journey.finish()
        if refused is not None:
            if self._optimizer is not None:
                self._optimizer.rollback()
            undo()
            raise refused
        if self._optimizer is not None:
            self._optimizer.commit()

    def _failure(self, message: str) -> MigrationError:
        return MigrationError(f"{self._what} failed and was undone on every rank ({message})")
