"""What a move costs, by the bytes that it moves: learnt from the newest moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median, median_low

REMEMBERED = 5
"""Newest moves that count."""


class MoveCosts:
    """A fixed part and one by bytes, both robust against a slow move (memory pools, connections)."""

    def __init__(self) -> None:
        self._moves: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)

    def record(self, num_bytes: int, seconds: float) -> None:
        """Take in a move.

        Args:
            num_bytes: that it moved; 0 when unknown.
            seconds: that it took, planning included, of the slowest rank.

        Raises:
            ValueError: for negative or non-finite seconds.
        """
        if not 0 <= seconds < float("inf"):
            raise ValueError(f"seconds = {seconds}: must be finite and >= 0")
        self._moves.append((num_bytes, seconds))

    def expected_s(self, num_bytes: int) -> float | None:
        """What a move will cost.

        Seconds by byte are the median over all pairs of moves (Theil 1950, Sen 1968), at least 0 and at most what any
        of them took by byte altogether: two moves of about as many bytes differ by what planning took. The fixed part
        is the lower median of what is left, so that a slow first move does not block others.

        Args:
            num_bytes: that it will move; 0 when unknown, which costs what moves usually do.

        Returns:
            Seconds; ``None`` before the first move.
        """
        if not self._moves:
            return None
        if not num_bytes or not all(size for size, _ in self._moves):
            return median_low(seconds for _, seconds in self._moves)
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(self._moves, 2) if a[0] != b[0]]
        most_by_byte_s = min(seconds / size for size, seconds in self._moves)
        by_byte_s = min(max(0.0, median(slopes)), most_by_byte_s) if slopes else 0.0
        fixed_s = median_low(seconds - by_byte_s * size for size, seconds in self._moves)
        return max(0.0, fixed_s) + by_byte_s * num_bytes

    def state_dict(self) -> list[tuple[int, float]]:
        """The moves, plain values."""
        return list(self._moves)

    def load_state_dict(self, state: Sequence[tuple[int, float] | float]) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; older checkpoints hold seconds alone.
        """
        moves = ((0, move) if isinstance(move, float | int) else (move[0], move[1]) for move in state)
        self._moves = deque(moves, maxlen=REMEMBERED)
