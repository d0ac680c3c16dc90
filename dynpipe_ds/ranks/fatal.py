"""What happens after a failure that nothing can undo: one policy, in this place.

The policy is to end all ranks, unless only ranks were lost and the others can go on without them. The first
:class:`Verdict` on a failure wins: whoever reaches it (``guard.py``) tells all others (``heartbeat.py``), every rank
raises it as the same error, and a process that still runs ``GRACE_S`` later, because somebody caught the error or a
call never returned, is ended.

Who can go on (``survive/``) says so by :func:`survive`: groups are then broken off before a verdict on lost ranks is
heard of, so that every rank raises it, and :func:`mourn` makes room for the next one.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

GRACE_S = 10.0
"""Seconds that a process has for raising the error, saying so and ending by itself."""

SURVIVING_S = 300.0
"""Seconds that a process which can go on without others has for coming to where it does so."""

_SPEAKING_S = 2.0

_BROKEN = re.compile(
    r"gloo|[Cc]onnection (was )?(closed|reset|refused)|[Bb]roken pipe|[Tt]imed out|remote process|NCCL", re.ASCII
)

NewestCheckpoint = Callable[[], str | None]
"""Finds the newest complete checkpoint that this run knows of."""


class FatalError(RuntimeError):
    """Something failed on some rank that nothing can undo, so every rank stops; the same text on each.

    Args:
        ranks: where it failed, kept as an attribute.
        message: the text; names ranks, reason and the last complete checkpoint.
    """

    def __init__(self, ranks: list[int], message: str) -> None:
        super().__init__(message)
        self.ranks = ranks


class RankLostError(FatalError):
    """A rank ended, was stopped or can't be reached, so no other one can go on.

    Args:
        ranks: who was lost, kept as an attribute.
        message: the text; names them and the last complete checkpoint.
    """


@dataclass(frozen=True)
class Verdict:
    """Why all ranks stop.

    Attributes:
        ranks: where the failure was.
        text: what every rank says.
        lost: whether these ranks are gone, rather than having said themselves what failed.
    """

    ranks: tuple[int, ...]
    text: str
    lost: bool

    def error(self) -> FatalError:
        """What a rank raises."""
        return (RankLostError if self.lost else FatalError)(list(self.ranks), self.text)


_held: Verdict | None = None
_others_wait = False
_break_off: Callable[[], object] | None = None
_timer: threading.Timer | None = None
_mourned: frozenset[int] = frozenset()
_lock = threading.RLock()


def apply_to_this_process(others_wait: bool) -> None:
    """Say whether the process is to end soon after a verdict even if its main thread goes on.

    Args:
        others_wait: whether there are other ranks, which would wait for it.
    """
    global _others_wait
    _others_wait = others_wait


def survive(break_off: Callable[[], object] | None) -> None:
    """Say what to do so that this process's main thread hears of lost ranks wherever it waits.

    Args:
        break_off: done before the verdict is known; ``None``: every loss ends this process.
    """
    global _break_off
    _break_off = break_off


def mourn(ranks: Collection[int]) -> None:
    """Hear no more that some ranks are lost, since this process goes on without them.

    Args:
        ranks: all that are known to be lost in this world; none in a new one.
    """
    global _held, _timer, _mourned
    with _lock:
        _mourned = frozenset(ranks)
        if _held is not None and _is_old(_held):
            if _timer is not None:
                _timer.cancel()
            _held = _timer = None


def _is_old(verdict: Verdict) -> bool:
    return verdict.lost and set(verdict.ranks) <= _mourned


def held() -> Verdict | None:
    """The first verdict that this process has heard of."""
    return _held


def hold(verdict: Verdict) -> Verdict:
    """Keep a verdict, unless there is an earlier one; from then on this process ends soon.

    Args:
        verdict: of this rank or of another one.

    Returns:
        The first one.
    """
    global _held, _timer
    with _lock:
        if _held is None and _is_old(verdict):
            return verdict
        if _held is None:
            goes_on = verdict.lost and _break_off is not None
            if goes_on and _break_off is not None:
                _break_off()
            _held = verdict
            if _others_wait:
                _timer = threading.Timer(SURVIVING_S if goes_on else GRACE_S, _end, [verdict.text])
                _timer.daemon = True
                _timer.start()
        return _held


def _end(text: str) -> NoReturn:
    """End this process although its main thread goes on; it may hold the locks of the streams."""

    def say() -> None:
        with suppress(OSError, ValueError):
            os.write(2, f"dynpipe_ds: {text}\n".encode(errors="backslashreplace"))
            sys.stdout.flush()
            sys.stderr.flush()

    speaker = threading.Thread(target=say, daemon=True)
    speaker.start()
    speaker.join(_SPEAKING_S)
    os._exit(1)


def names(ranks: Sequence[int]) -> str:
    """Ranks as a text names them."""
    return ", ".join(f"rank {rank}" for rank in ranks)


def verdict(ranks: Sequence[int], happened: str, newest_checkpoint: NewestCheckpoint, *, lost: bool = True) -> Verdict:
    """The verdict on some ranks.

    Args:
        ranks: where the failure was.
        happened: what they did; ends with ``"so every rank stops; "``.
        newest_checkpoint: finds what to go on from.
        lost: whether they are gone, rather than having said themselves what failed.
    """
    newest = newest_checkpoint()
    where = (
        f"the last complete checkpoint is {newest}: load it and go on from there"
        if newest else "no checkpoint was saved or loaded by this run"
    )
    return Verdict(tuple(ranks), f"{names(ranks)} {happened}{where}", lost)


def broke_connection(error: BaseException) -> bool:
    """Say whether an error looks like a lost connection to another rank."""
    return isinstance(error, dist.DistError) or bool(_BROKEN.search(str(error)))
