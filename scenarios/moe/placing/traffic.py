"""What a placement makes each rank compute, send and receive: sums of loads, before any of it is seconds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from scenarios.moe.placing.constants import Agg
from scenarios.moe.placing.lanes import Lanes

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@lru_cache(maxsize=64)
def homes(num_ranks: int, num_experts: int) -> Ints:
    """Home of every expert, ``[E]``, not to be written to.

    Args:
        num_ranks: R.
        num_experts: E, a multiple of R.
    """
    found = np.array(Lanes.static(num_ranks, num_experts).owner[0], dtype=np.int64)
    found.setflags(write=False)
    return found


@lru_cache(maxsize=64)
def summing_orders(num_ranks: int) -> Ints:
    """Sources in the order in which gradients of lanes are added up, by home, ``[R, R]``, not to be written to.

    See :meth:`~scenarios.moe.placing.Lanes.summing_order`.

    Args:
        num_ranks: R.
    """
    ranks = np.arange(num_ranks)
    found: Ints = (ranks[:, None] + ranks + 1) % num_ranks
    found.setflags(write=False)
    return found


def last_holders(copies: Flags, home: Ints) -> Ints:
    """The last rank around the ring from each expert's home that holds a copy of it; any, where none does.

    Args:
        copies: which rank holds one, ``[N, R]``.
        home: of each expert, ``[N]``.
    """
    orders = summing_orders(copies.shape[1])[home]
    last = copies.shape[1] - 1 - np.take_along_axis(copies, orders, axis=1)[:, ::-1].argmax(axis=1)
    found: Ints = np.take_along_axis(orders, last[:, None], axis=1)[:, 0]
    return found


def as_loads(loads: Any) -> Floats:
    """Rows of each source for each expert, checked.

    Args:
        loads: anything numpy reads, ``[R, E]``.

    Returns:
        The same as float64.

    Raises:
        ValueError: when it is no table, or has a number below 0 or not finite.
    """
    table = np.asarray(loads, dtype=np.float64)
    if table.ndim != 2:
        raise ValueError(f"loads of shape {table.shape}: must be [ranks, experts]; give one row a source rank")
    if table.size and not (np.isfinite(table).all() and table.min() >= 0):
        raise ValueError(
            f"loads from {table.min()} to {table.max()}: rows can't be fewer than 0 or not finite; count them again"
        )
    return table


def as_lanes(owner: Ints) -> Lanes:
    """A table of owners as a value.

    Args:
        owner: ``[R, E]``.
    """
    return Lanes(tuple(tuple(row) for row in owner.tolist()))


@dataclass(frozen=True)
class Rows:
    """Rows that ranks compute and exchange, ``[R]`` each.

    Args:
        computed: rows of all lanes of a rank (the paper's H).
        lanes: lanes of a rank that have rows.
        inbound: rows that a rank gets from others before it computes (the paper's R).
        outbound: rows that a rank sends to others before they compute; its answers come back as many.
    """

    computed: Floats
    lanes: Floats
    inbound: Floats
    outbound: Floats

    @property
    def fullest_link(self) -> float:
        """Rows on the fullest link, in either direction."""
        return float(max(self.inbound.max(), self.outbound.max()))


def count_rows(owner: Ints, loads: Floats) -> Rows:
    """Count what ranks compute and exchange.

    Args:
        owner: rank of every lane, ``[R, E]``.
        loads: rows of every lane, ``[R, E]``.

    Returns:
        By rank.
    """
    num_ranks = len(owner)
    flat, rows = owner.ravel(), loads.ravel()
    computed = np.bincount(flat, weights=rows, minlength=num_ranks).astype(np.float64)
    lanes = np.bincount(flat, weights=rows > 0, minlength=num_ranks).astype(np.float64)
    own = np.where(owner == np.arange(num_ranks)[:, None], loads, 0.0).sum(axis=1)
    return Rows(computed, lanes, computed - own, loads.sum(axis=1) - own)


@dataclass(frozen=True)
class Transfers:
    """Transfers of whole experts, or of their gradients, that a placement needs.

    Args:
        inbound: how many each rank receives, ``[R]``.
        outbound: how many each rank sends, ``[R]``.
        depth: hops of the longest chain; 0 if nothing travels.
    """

    inbound: Ints
    outbound: Ints
    depth: int

    @property
    def fullest_link(self) -> int:
        """Transfers on the fullest link, in either direction."""
        return int(max(self.inbound.max(), self.outbound.max()))


def held(owner: Ints) -> Flags:
    """Which rank needs which expert's weights without being its home, ``[R, E]``.

    Args:
        owner: rank of every lane, ``[R, E]``.
    """
    num_ranks, num_experts = owner.shape
    found = np.zeros((num_ranks, num_experts), dtype=np.bool_)
    experts = np.arange(num_experts)
    found[owner, experts] = True
    found[homes(num_ranks, num_experts), experts] = False
    return found


def count_trans(copies: Flags) -> Transfers:
    """Transfers of weights: each expert goes from its home around the ring of its holders, each forwarding it.

    Args:
        copies: of :func:`held`.

    Returns:
        By rank.
    """
    num_ranks, num_experts = copies.shape
    hops = copies.sum(axis=0)
    inbound = copies.sum(axis=1)
    home = homes(num_ranks, num_experts)
    starts = np.bincount(home[hops > 0], minlength=num_ranks)
    ends = np.bincount(last_holders(copies.T, home)[hops > 0], minlength=num_ranks)
    return Transfers(inbound, inbound + starts - ends, int(hops.max()))


def count_agg(owner: Ints, loads: Floats, how: Agg) -> Transfers:
    """Transfers of gradients; lanes without rows have none.

    Args:
        owner: rank of every lane, ``[R, E]``.
        loads: rows of every lane, ``[R, E]``.
        how: see :class:`~scenarios.moe.placing.constants.Constants`.

    Returns:
        By rank.
    """
    num_ranks, num_experts = owner.shape
    home = homes(num_ranks, num_experts)
    if how == "sums":
        there = count_trans(held(owner))
        return Transfers(there.outbound, there.inbound, there.depth)
    filled = loads > 0
    if how == "lanes":
        away = (owner != home) & filled
        inbound = np.bincount(home, weights=away.sum(axis=0), minlength=num_ranks).astype(np.int64)
        return Transfers(inbound, np.bincount(owner[away], minlength=num_ranks), int(away.any()))
    orders = summing_orders(num_ranks)[home].T
    owner, filled = (np.take_along_axis(each, orders, axis=0) for each in (owner, filled))
    # Where the running sum is after each source: at the last lane with rows, nowhere before the first.
    last = np.maximum.accumulate(np.where(filled, np.arange(num_ranks)[:, None], -1), axis=0)
    before = np.take_along_axis(owner, np.maximum(last, 0), axis=0)
    after = np.concatenate((before[1:], home[None]))
    moves = (before != after) & (last >= 0)
    inbound = np.bincount(after[moves], minlength=num_ranks)
    return Transfers(inbound, np.bincount(before[moves], minlength=num_ranks), int(moves.sum(axis=0).max()))
