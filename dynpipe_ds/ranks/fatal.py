"""What happens after a failure that nothing can undo: one policy, in this place.

The policy is to end all ranks. The first :class:`Verdict` on a failure wins: whoever reaches it tells all others
(``heartbeat.py``), every rank raises it as the same error, and a process that still runs ``GRACE_S`` later, because
somebody caught the error or a call never returned, is ended.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch.distributed as dist

if TYPE_CHECKING:
    from dynpipe_ds.ranks.heartbeat import Heartbeat

GRACE_S = 10.0
"""Seconds that a process has for raising the error, saying so and ending by itself."""

_SPEAKING_S = 2.0
_LONGEST_REASON = 2000  # letters: the text travels to every rank

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
_lock = threading.Lock()


def apply_to_this_process(others_wait: bool) -> None:
    """Say whether the process is to end soon after a verdict even if its main thread goes on.

    Args:
        others_wait: whether there are other ranks, which would wait for it.
    """
    global _others_wait
    _others_wait = others_wait


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
    global _held
    with _lock:
        if _held is None:
            _held = verdict
            if _others_wait:
                timer = threading.Timer(GRACE_S, _end, [verdict.text])
                timer.daemon = True
                timer.start()
        return _held


def raise_if_fatal() -> None:
    """Raise the error again that has already ended training in this process, if there was one.

    Raises:
        FatalError: the same as before.
    """
    if _held is not None:
        raise _held.error()


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


# -- texts ------------------------------------------------------------------------------------


def names(ranks: Sequence[int]) -> str:
    """Ranks as a text names them.

    Args:
        ranks: which.
    """
    return ", ".join(f"rank {rank}" for rank in ranks)


def _where_to_go_on(newest_checkpoint: NewestCheckpoint) -> str:
    newest = newest_checkpoint()
    return (
        f"the last complete checkpoint is {newest}: load it and go on from there"
        if newest else "no checkpoint was saved or loaded by this run"
    )


def failed(rank: int, error: BaseException, doing: str, newest_checkpoint: NewestCheckpoint) -> Verdict:
    """The verdict on a rank that could not do its part.

    Args:
        rank: which.
        error: why.
        doing: what went on, for the text: ``"layers were moved"``.
        newest_checkpoint: finds it.
    """
    reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON]
    return Verdict((rank,), (
        f"rank {rank} failed while {doing} ({reason}), which can't be undone, so every rank stops; "
        f"{_where_to_go_on(newest_checkpoint)}"
    ), lost=False)


def ended(ranks: Sequence[int], doing: str, newest_checkpoint: NewestCheckpoint) -> Verdict:
    """The verdict on ranks whose processes are no more.

    Args:
        ranks: which.
        doing: what went on, for the text.
        newest_checkpoint: finds it.
    """
    where = _where_to_go_on(newest_checkpoint)
    return Verdict(tuple(ranks), f"{names(ranks)} ended while {doing}, so every rank stops; {where}", lost=True)


def silent(ranks: Sequence[int], doing: str, newest_checkpoint: NewestCheckpoint) -> Verdict:
    """The verdict on ranks that don't answer although nobody else has ended.

    Args:
        ranks: which.
        doing: what went on, for the text.
        newest_checkpoint: finds it.
    """
    return Verdict(tuple(ranks), (
        f"{names(ranks)} did not answer while {doing} (stopped, or the machine is gone), so every rank stops; "
        f"{_where_to_go_on(newest_checkpoint)}"
    ), lost=True)


# -- around code that can fail ----------------------------------------------------------------


def broke_connection(error: BaseException) -> bool:
    """Say whether an error looks like a lost connection to another rank.

    Args:
        error: any.
    """
    if isinstance(error, FatalError):
        return False
    return isinstance(error, dist.DistError) or bool(_BROKEN.search(str(error)))


@contextmanager
def naming_lost_ranks(
    heartbeat: Heartbeat | None, doing: str, newest_checkpoint: NewestCheckpoint
) -> Iterator[None]:
    """Turn a broken connection into an error that says who was lost or failed, and where to go on from.

    Args:
        heartbeat: this process's; without one, errors pass as they are.
        doing: what goes on inside, for the message: ``"batch 12 was trained"``.
        newest_checkpoint: finds the newest complete checkpoint that this run knows of.

    Raises:
        FatalError: if some rank failed where nothing can be undone, here or elsewhere, now or earlier.
        RankLostError: if communication broke down inside because another rank was lost.
    """
    raise_if_fatal()
    with nullcontext() if heartbeat is None else heartbeat.watching(doing, newest_checkpoint):
        try:
            yield
        except FatalError:
            raise
        except Exception as error:
            verdict = _cause(error, heartbeat, doing, newest_checkpoint)
            if verdict is None:
                raise
            raise verdict.error() from error


@contextmanager
def no_way_back(heartbeat: Heartbeat | None, doing: str, newest_checkpoint: NewestCheckpoint) -> Iterator[None]:
    """End all ranks if anything fails inside, since nothing there can be undone.

    Args:
        heartbeat: this process's; without one, the other ranks notice when this process ends.
        doing: what goes on inside, for the message: ``"layers were moved"``.
        newest_checkpoint: finds the newest complete checkpoint that this run knows of.

    Raises:
        FatalError: if anything raised inside, on this rank or on another one.
        RankLostError: if it was because another rank was lost.
    """
    with naming_lost_ranks(heartbeat, doing, newest_checkpoint):
        try:
            yield
        except FatalError:
            raise
        except Exception as error:
            verdict = _cause(error, heartbeat, doing, newest_checkpoint)
            if verdict is None:
                verdict = failed(_rank(heartbeat), error, doing, newest_checkpoint)
                verdict = hold(verdict) if heartbeat is None else heartbeat.settle(verdict)
            raise verdict.error() from error


def _rank(heartbeat: Heartbeat | None) -> int:
    """This rank, as it was when the code began: re-packing gives other numbers on the way."""
    if heartbeat is not None:
        return heartbeat.rank
    return dist.get_rank() if dist.is_initialized() else 0


def _cause(
    error: Exception, heartbeat: Heartbeat | None, doing: str, newest_checkpoint: NewestCheckpoint
) -> Verdict | None:
    """The verdict behind an error, if it is another rank's fault."""
    if _held is None and heartbeat is not None and broke_connection(error):
        return heartbeat.find_lost(doing, newest_checkpoint)
    return _held
