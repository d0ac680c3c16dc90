"""How often the same wish must be heard before it is carried out, so that noise moves nothing to and fro."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TWICE = 2
"""A first change, or one more in the same direction, is carried out when two decisions in a row ask for it."""

TURN = 8
"""A change back must be asked for so often in a row: noise alone seldom does. Each further turn needs twice as many."""

MOST = 64
"""But no more than so many, or a load that really comes and goes would be followed ever more slowly."""


class Confirmation:
    """Hears what each decision wishes, and tells when that was said often enough; pure.

    Attributes:
        wished: number of stages that the newest decision asked for; ``None``: the present one.
    """

    def __init__(self) -> None:
        self.wished: int | None = None
        self._is_more = False
        self._times = 0
        self._last_was_more: bool | None = None
        self._num_turns = 0

    def hear(self, present: int, wished: int | None) -> bool:
        """Take in a wish.

        Args:
            present: number of stages now.
            wished: another number; ``None``: the present one.

        Returns:
            Whether to carry it out: asked for often enough in this direction, and with this number twice.
        """
        if wished is None:
            self.wished, self._times = None, 0
            return False
        is_more, said_before = wished > present, self.wished == wished
        self._times = self._times + 1 if self.wished is not None and is_more == self._is_more else 1
        self.wished, self._is_more = wished, is_more
        return said_before and self._times >= self._needed(is_more)

    def carried_out(self, before: int, after: int) -> None:
        """Take note that the number of stages has changed, by whosever word.

        Args:
            before: number of stages.
            after: the same since then.
        """
        is_more = after > before
        self._num_turns += self._is_turn(is_more)
        self._last_was_more = is_more
        self.wished, self._times = None, 0

    def _is_turn(self, is_more: bool) -> bool:
        return self._last_was_more is not None and self._last_was_more != is_more

    def _needed(self, is_more: bool) -> int:
        return min(MOST, TURN << self._num_turns) if self._is_turn(is_more) else TWICE

    def state_dict(self) -> dict[str, Any]:
        """All of it, as plain values."""
        return {
            "wished_stages": self.wished, "is_more": self._is_more, "times": self._times,
            "last_was_more": self._last_was_more, "num_turns": self._num_turns,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], *, same_stages: bool) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; older checkpoints have none but ``wished_stages``.
            same_stages: whether it comes from as many stages; else what was wished there is forgotten.
        """
        self.wished = state.get("wished_stages") if same_stages else None
        self._is_more = state.get("is_more", False)
        self._times = state.get("times", 1) if self.wished is not None else 0
        self._last_was_more, self._num_turns = state.get("last_was_more"), state.get("num_turns", 0)
