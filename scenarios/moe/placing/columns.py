"""What one expert's column of owners makes each rank do, for many columns at once.

A placement's sums are those of its columns, so a search that changes one expert at a time only needs new columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scenarios.moe.placing.constants import Agg
from scenarios.moe.placing.model import LayerModel
from scenarios.moe.placing.traffic import Flags, Floats, Ints, homes, last_holders, summing_orders

COMPUTE, INBOUND, OUTBOUND, TRANS_IN, TRANS_OUT, AGG_IN, AGG_OUT = range(7)
"""Rows of :attr:`Sums.by_rank`: seconds of computing; seconds of four exchanges; transfers."""


@dataclass(frozen=True)
class Sums:
    """What N columns make ranks do.

    Args:
        by_rank: ``[7, N, R]``, in the order of the names above.
        hops: of each column's chains of Trans and of Agg, ``[2, N]``.
    """

    by_rank: Floats
    hops: Floats


class Columns:
    """One layer's loads, and what any column of owners makes of them.

    Args:
        model: for the seconds of rows.
        loads: rows of every lane, ``[R, E]``.
    """

    def __init__(self, model: LayerModel, loads: Floats) -> None:
        constants = model.constants
        self.num_ranks, self.num_experts = loads.shape
        self.home = homes(self.num_ranks, self.num_experts)
        self.rows = np.ascontiguousarray(loads.T)
        self.orders = summing_orders(self.num_ranks)[self.home]
        lane_s = constants.lane_s * constants.num_micro_batches
        self.lane_s = self.rows * (constants.forward_row_s + constants.backward_s) + lane_s * (self.rows > 0)
        self.row_s = self.rows * (4 * constants.row_bytes * constants.byte_s)
        self.all_filled = bool((self.rows > 0).all())
        self.agg: Agg = constants.agg

    def sums(self, columns: Ints, experts: Ints) -> Sums:
        """Add up what ranks do for some experts.

        Args:
            columns: owners by source, ``[N, R]``.
            experts: whose columns they are, ``[N]``.

        Returns:
            By column and rank.
        """
        count, num_ranks = columns.shape
        size = count * num_ranks
        cell = (columns + np.arange(0, size, num_ranks)[:, None]).ravel()
        by_rank = np.empty((7, size))
        row_s = self.row_s[experts]
        own = columns == np.arange(num_ranks)
        away_s = np.where(own, 0.0, row_s).ravel()
        by_rank[COMPUTE] = np.bincount(cell, self.lane_s[experts].ravel(), size)
        by_rank[INBOUND] = np.bincount(cell, away_s, size)
        by_rank[OUTBOUND] = away_s
        copies = np.bincount(cell, minlength=size).reshape(count, num_ranks) > 0
        home = self.home[experts]
        lines = np.arange(count)
        copies[lines, home] = False
        hops = np.empty((2, count))
        shaped = by_rank.reshape(7, count, num_ranks)
        hops[0] = _trans(copies, home, shaped[TRANS_IN], shaped[TRANS_OUT])
        if self.agg == "sums":
            shaped[AGG_IN], shaped[AGG_OUT], hops[1] = shaped[TRANS_OUT], shaped[TRANS_IN], hops[0]
        elif self.agg == "lanes":
            away = (columns != home[:, None]) & (self.rows[experts] > 0)
            shaped[AGG_IN] = 0.0
            shaped[AGG_IN, lines, home] = away.sum(axis=1)
            by_rank[AGG_OUT] = np.bincount(cell, away.ravel(), size)
            hops[1] = away.any(axis=1)
        else:
            self._chains(columns, experts, by_rank, hops)
        return Sums(shaped, hops)

    def _chains(self, columns: Ints, experts: Ints, by_rank: Floats, hops: Floats) -> None:
        """Sums that visit the lanes with rows in the order of summing, then go home."""
        count, num_ranks = columns.shape
        orders = self.orders[experts]
        before, started = np.take_along_axis(columns, orders, axis=1), None
        if not self.all_filled:
            columns, filled = before, np.take_along_axis(self.rows[experts] > 0, orders, axis=1)
            last = np.maximum.accumulate(np.where(filled, np.arange(num_ranks), -1), axis=1)
            before = np.take_along_axis(columns, np.maximum(last, 0), axis=1)
            started = last >= 0
        after = np.concatenate((before[:, 1:], self.home[experts][:, None]), axis=1)
        moves = before != after if started is None else (before != after) & started
        offset = np.arange(0, count * num_ranks, num_ranks)[:, None]
        by_rank[AGG_IN] = np.bincount((after + offset)[moves], minlength=count * num_ranks)
        by_rank[AGG_OUT] = np.bincount((before + offset)[moves], minlength=count * num_ranks)
        hops[1] = moves.sum(axis=1)


def _trans(copies: Flags, home: Ints, inbound: Floats, outbound: Floats) -> Floats:
    """Chains from the home around the ring of holders; fills what they receive and send, returns the hops."""
    number = copies.sum(axis=1)
    inbound[:] = copies
    outbound[:] = copies
    some = np.flatnonzero(number)
    outbound[some, last_holders(copies[some], home[some])] = 0.0
    outbound[some, home[some]] = 1.0
    hops: Floats = number.astype(np.float64)
    return hops
