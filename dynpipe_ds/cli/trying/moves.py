"""Random moves, the same on every rank: the boundaries of the next one, and what was refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from dynpipe_ds.migration.moves import plan_moves
from dynpipe_ds.migration.transaction import MigrationError

_CANDIDATES = 20  # of which the one is taken that moves most layers that have not moved yet
_ATTEMPTS = 5  # of boundaries that are refused, before a move is left out


class RandomMoves:
    """Moves of one engine, which follow from a seed; ``say`` is told of them by name and values."""

    def __init__(self, engine: Any, seed: int, say: Callable[..., None]) -> None:
        self._engine, self._say = engine, say
        self._random = random.Random(seed)
        self._moved: set[int] = set()
        self._refused: set[tuple[int, ...]] = set()

    def move(self, batch: int) -> None:
        """Move to other boundaries, if there are any that are not refused; collective over all ranks."""
        for _ in range(_ATTEMPTS):
            boundaries = self._next()
            if boundaries is None:
                return
            before = tuple(self._engine.partition)
            try:
                event = self._engine.repartition(boundaries)
            except (ValueError, MigrationError) as error:  # the same on every rank; nothing has moved
                self._refused.add(boundaries)
                failed = isinstance(error, MigrationError)
                self._say("refused", batch=batch, boundaries=boundaries, text=str(error), failed=failed)
                continue
            self._moved |= _moving(before, boundaries)
            seconds = 0.0 if event is None else event.seconds
            self._say("move", batch=batch, before=before, after=boundaries, seconds=seconds, layers=sorted(self._moved))
            return

    def _next(self) -> tuple[int, ...] | None:
        """Of some random boundaries those that move most layers for the first time."""
        engine = self._engine
        present, num_inner = tuple(engine.partition), int(engine.num_stages) - 1
        pinned = {*engine.module.pinned_cuts, *engine.dynamic_config.pinned_cuts}
        cuts = [cut for cut in range(1, present[-1]) if cut not in pinned]
        if len(cuts) < num_inner:
            return None
        drawn = [(0, *sorted(self._random.sample(cuts, num_inner)), present[-1]) for _ in range(_CANDIDATES)]
        allowed = [candidate for candidate in drawn if candidate != present and candidate not in self._refused]
        return max(allowed, key=lambda candidate: len(_moving(present, candidate) - self._moved), default=None)


def _moving(before: tuple[int, ...], after: tuple[int, ...]) -> set[int]:
    return {move.layer for move in plan_moves(before, after)}
