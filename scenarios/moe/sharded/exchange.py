"""Rows on their way to the ranks of their lanes, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from scenarios.moe.placing import Lanes
from scenarios.moe.sharded.meetings import Meetings

THERE, BACK = 1, 2
"""Topics of meetings."""


class Span(NamedTuple):
    """Rows of one lane among those that a rank computes: ``start`` to ``stop``."""

    source: int
    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class LaneExchange:
    """How the rows of one layer and micro-batch travel to the ranks of their lanes, and back.

    Attributes:
        group: the ranks that share the experts.
        meetings: of them.
        spans: lanes that have rows and are computed here, in the order of sources and then experts.
        send: rows for each rank.
        receive: rows from each rank.
        order: where each row that is sent, sorted by rank and then expert, is among this rank's rows, which are sorted
            by expert; ``None``: they lie as they are sent.
        is_local: whether no row of any rank travels.
        swapped: told the seconds of each exchange, from the time on at which all ranks had come to it.
    """

    group: dist.ProcessGroup
    meetings: Meetings
    spans: tuple[Span, ...]
    send: list[int]
    receive: list[int]
    order: Tensor | None
    is_local: bool
    swapped: Callable[[float], object] = lambda _seconds: None

    def there(self, rows: Tensor) -> Tensor:
        """Bring this rank's rows, sorted by expert, to their lanes; return what came in, lane by lane."""
        rows = rows if self.order is None else rows.index_select(0, self.order)
        return rows if self.is_local else self._swap(THERE, rows, self.send, self.receive)

    def back(self, rows: Tensor) -> Tensor:
        """Bring rows from the lanes to where they came from, in their order there."""
        arrived = rows if self.is_local else self._swap(BACK, rows, self.receive, self.send)
        if self.order is None:
            return arrived
        sorted_rows = torch.empty_like(arrived)
        sorted_rows[self.order] = arrived
        return sorted_rows

    def _swap(self, topic: int, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        self.meetings.meet(topic)
        began = perf_counter()
        arrived = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), receive, send, group=self.group)
        self.swapped(perf_counter() - began)
        return arrived


def plan_lanes(
    table: Sequence[Sequence[int]], lanes: Lanes, rank: int, group: dist.ProcessGroup, meetings: Meetings,
    device: torch.device, swapped: Callable[[float], object] = lambda _seconds: None,
) -> LaneExchange:
    """Plan how rows travel; the same on all ranks where it must be.

    Args:
        table: rows of each rank for each expert, ``[R][E]``.
        lanes: who computes them.
        rank: this one, within the group.
        group: the ranks that share the experts.
        meetings: of them.
        device: of the rows.
        swapped: see :class:`LaneExchange`.

    Returns:
        The exchange of one micro-batch.
    """
    owner, sources = lanes.owner, range(lanes.num_ranks)
    mine = [
        (source, expert, count)
        for source in sources
        for expert, count in enumerate(table[source])
        if count and owner[source][expert] == rank
    ]
    ends = list(accumulate(count for *_, count in mine))
    spans = tuple(Span(s, e, end - count, end) for (s, e, count), end in zip(mine, ends, strict=True))
    send, receive = [0] * lanes.num_ranks, [0] * lanes.num_ranks
    for expert, count in enumerate(table[rank]):
        send[owner[rank][expert]] += count
    for source, _, count in mine:
        receive[source] += count
    is_local = all(
        not count or owner[source][expert] == source for source in sources for expert, count in enumerate(table[source])
    )
    order = _order(table[rank], owner[rank], device)
    return LaneExchange(group, meetings, spans, send, receive, order, is_local, swapped)


def _order(counts: Sequence[int], owners: Sequence[int], device: torch.device) -> Tensor | None:
    """Rows sorted by the rank that they go to."""
    going = [owner for owner, count in zip(owners, counts, strict=True) if count]
    if going == sorted(going):
        return None
    to = torch.tensor(owners).repeat_interleave(torch.tensor(counts))
    return to.argsort(stable=True).to(device)


class _There(torch.autograd.Function):
    leaves_gradients_alone = True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: LaneExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.there(rows).view_as(rows) if exchange.is_local else exchange.there(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.back(gradient), None


class _Back(torch.autograd.Function):
    leaves_gradients_alone = True

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: LaneExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.back(rows).view_as(rows) if exchange.is_local else exchange.back(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.there(gradient), None


def to_lanes(rows: Tensor, exchange: LaneExchange) -> Tensor:
    """Bring rows ``[N, hidden]`` to the ranks of their lanes; the gradient takes the way back. Collective."""
    return _There.apply(rows, exchange)


def from_lanes(rows: Tensor, exchange: LaneExchange) -> Tensor:
    """Bring the lanes' answers to the tokens' ranks; the gradient takes the way back. Collective."""
    return _Back.apply(rows, exchange)
