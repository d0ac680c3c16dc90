"""Micro-batches that are to be trained again, for ranks that read data from now on and have not read these."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import torch

from dynpipe_ds.host.reading import FOR_EVER
from dynpipe_ds.host.rereading import Position
from dynpipe_ds.migration.transport import exchange_bytes
from dynpipe_ds.ranks.agreement import gather, together

if TYPE_CHECKING:
    from dynpipe_ds.run import Run


class SnapshotError(RuntimeError):
    """Training can't go back to a snapshot, on any rank; nothing has changed."""


def share_data(
    run: Run, first: int, until: int, where: str, *, position: Position | None = None, kept_from: int | None = None
) -> None:
    """Let ranks that read data, and lack these batches, have them; collective over all ranks.

    Another rank of the same replica may have kept them. If none has, they are read again. A rank that trains other
    data than its iterators give reads from now on what ``engine.data_at`` opens.

    Args:
        run: of this rank.
        first: of the batches.
        until: behind the last one.
        where: training goes back to, for messages.
        position: of this rank's iterator when the first of them began, if it can go back there.
        kept_from: batches from this one on are kept when they are read again; by default the first.

    Raises:
        SnapshotError: on every rank, if nobody has them.
    """
    pipeline, kept = run.stage.pipeline, run.stage.pipeline.reading.kept
    wanted, is_other = range(first, until), pipeline.reading.is_of_others
    has_all = all(kept.num_read(b) == pipeline.reading.num_loaded for b in wanted)
    # Every rank that read data then has read all of these, whichever batch it has come to itself: one that lacks
    # some reads from now on, and its iterator is behind them.
    lacks = pipeline.reading.is_here and (is_other or not all(kept.num_read(b) for b in wanted))
    can = pipeline.reading.open_at is not None or (position is not None and not is_other)
    told = gather((pipeline.replica, lacks, has_all and not is_other, can, is_other))
    givers = {replica: rank for rank, (replica, _, has, _, _) in reversed(list(enumerate(told))) if has}
    lacking = [rank for rank, (_, lacks, _, _, _) in enumerate(told) if lacks]
    again = [rank for rank in lacking if told[rank][3] and (told[rank][4] or told[rank][0] not in givers)]
    lost = [rank for rank in lacking if rank not in again and (told[rank][4] or told[rank][0] not in givers)]
    if lost:
        raise SnapshotError(
            f"going back to {where} failed, nothing has changed (no rank that is left has the micro-batches of "
            f"batches {first} to {max(first, until - 1)} that ranks {lost} would read)"
        )

    def open_source() -> None:
        end = FOR_EVER if is_other else until
        source = pipeline.reading.since(first, end, position) if pipeline.rank in again else None
        if source is not None:
            kept.read_again(source, first, first if kept_from is None else kept_from, end)

    together(open_source, run.stage.device, SnapshotError)
    pairs = [(givers[told[rank][0]], rank) for rank in lacking if rank not in again] if wanted else []
    rank = pipeline.rank
    sends = {to: _written(kept.give(first, until)) for giver, to in pairs if giver == rank}
    for data in exchange_bytes(sends, [giver for giver, to in pairs if to == rank], run.stage.device).values():
        kept.take(torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))


def _written(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
