"""Micro-batches that are to be trained again, for ranks that read data from now on and have not read these."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from dynpipe_ds.migration.transport import exchange_bytes
from dynpipe_ds.ranks.agreement import gather

if TYPE_CHECKING:
    from dynpipe_ds.run import Run


class SnapshotError(RuntimeError):
    """Training can't go back to a snapshot, on any rank; nothing has changed."""


def share_data(run: Run, first: int, until: int, where: str, *, reads_again: bool = False) -> None:
    """Give ranks that read data, and lack these batches, what others of their replica have kept; collective.

    Args:
        run: of this rank.
        first: of the batches.
        until: behind the last one.
        where: training goes back to, for messages.
        reads_again: whether this rank has another source of them.

    Raises:
        SnapshotError: on every rank, if nobody has them.
    """
    pipeline, kept = run.stage.pipeline, run.stage.pipeline.kept
    wanted = range(first, until)
    has_all = all(kept.num_read(b) == pipeline.num_loaded for b in wanted)
    # Every rank that read data then has read all of these, whichever batch it has come to itself: one that lacks
    # some reads from now on, and its iterator is behind them.
    lacks = pipeline.reads_data and not reads_again and not all(kept.num_read(b) for b in wanted)
    told = gather((pipeline.replica, lacks, has_all))
    givers = {replica: rank for rank, (replica, _, has) in reversed(list(enumerate(told))) if has}
    lacking = [rank for rank, (_, lacks, _) in enumerate(told) if lacks]
    lost = [rank for rank in lacking if told[rank][0] not in givers]
    if lost and wanted:
        raise SnapshotError(
            f"going back to {where} failed, nothing has changed (no rank that is left has the micro-batches of "
            f"batches {wanted[0]} to {wanted[-1]} that ranks {lost} would read)"
        )
    pairs = [(givers[told[rank][0]], rank) for rank in lacking] if wanted else []
    rank = pipeline.rank
    sends = {to: _written(kept.give(first, until)) for giver, to in pairs if giver == rank}
    for data in exchange_bytes(sends, [giver for giver, to in pairs if to == rank], run.stage.device).values():
        kept.take(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def _written(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
