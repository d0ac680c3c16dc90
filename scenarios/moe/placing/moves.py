"""Which changes a search looks at: lanes that leave a rank, tokens kept at home, copies given up."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from scenarios.moe.placing.columns import INBOUND, OUTBOUND, TRANS_IN
from scenarios.moe.placing.state import Candidates, State
from scenarios.moe.placing.traffic import Flags, Floats, Ints


@lru_cache(maxsize=1024)
def shed_orders(num_ranks: int, rank: int) -> tuple[Ints, Ints, Ints]:
    """Orders in which lanes go from one rank to each other, three for each.

    Of the receiver's own tokens and then its neighbours' alternately; of sources from the giver's successor on around
    the ring; the other way around. What it then computes is a range of sources, where a running sum of gradients stops
    once. What the giver computes for its own tokens goes last, for those would travel then.

    Args:
        num_ranks: R.
        rank: the giver.

    Returns:
        Sources in order ``[3 R - 3, R]``, the place of each source in it, and the receivers ``[3 R - 3]``.
    """
    rising = [(rank + 1 + step) % num_ranks for step in range(num_ranks)]
    place = [(source - rank - 1) % num_ranks for source in range(num_ranks)]  # the giver, mostly the home, is last
    near = [
        sorted(rising, key=lambda s: (abs(place[s] - place[to]), place[s] < place[to])) for to in range(num_ranks)
    ]
    orders = np.array(near + [rising] * num_ranks + [rising[::-1]] * num_ranks)
    to = np.tile(np.arange(num_ranks), 3)
    orders, to = orders[to != rank], to[to != rank]
    orders = np.take_along_axis(orders, np.argsort(orders == rank, axis=1, kind="stable"), axis=1)
    return orders, np.argsort(orders, axis=1), to


def sheds(state: State, rank: int, most: int) -> Candidates:
    """Best moves that take lanes from a rank: of one expert, to one rank, of the first sources in some order.

    Every expert that the rank computes, every other rank, every number of sources: O(E R^2).

    Args:
        state: the present placement.
        rank: which has too much.
        most: how many moves.

    Returns:
        Those that a rough estimate finds best.
    """
    here = state.columns == rank
    experts = np.flatnonzero(here.any(axis=1))
    orders, places, to = shed_orders(state.num_ranks, rank)
    if not len(experts) or not len(to):
        return Candidates(experts[:0], state.columns[:0])
    here = here[experts]
    score = _estimate(state, rank, experts, here, orders, to)
    flat = score.ravel()
    found = np.argpartition(flat, most)[:most] if most < flat.size else np.arange(flat.size)
    found = np.sort(found[np.isfinite(flat[found])])
    line, last, which = np.unravel_index(found, score.shape)
    goes = here[which] & (places[line] <= last[:, None])
    columns = np.where(goes, to[line][:, None], state.columns[experts[which]])
    return Candidates(experts[which], columns)


def _estimate(state: State, rank: int, experts: Ints, here: Flags, orders: Ints, to: Ints) -> Floats:
    """Roughly the objective after the first sources of each order went, ``[orders, sources, experts]``."""
    moved = np.where(here, state.of.lane_s[experts], 0.0).T[orders].cumsum(axis=1)
    sent = np.where(here, state.of.row_s[experts], 0.0).T[orders]
    kept = np.where((orders == to[:, None])[:, :, None], sent, 0.0).cumsum(axis=1)  # no longer travels
    back = np.where((orders == rank)[:, :, None], sent, 0.0)  # travels now; always the last source
    sent = sent.cumsum(axis=1)
    inbound, outbound = state.totals[INBOUND], state.totals[OUTBOUND]
    compute = state.compute[rank] - moved, state.compute[to][:, None, None] + moved
    link = (
        np.maximum(inbound[rank] - sent + back, outbound[rank] + back),
        np.maximum(inbound[to][:, None, None] + sent - kept, outbound[to][:, None, None] - kept),
    )
    busiest = np.maximum(np.maximum(*compute), largest_of_others(state.compute, rank)[to][:, None, None])
    fullest = np.maximum(np.maximum(*link), largest_of_others(state.link, rank)[to][:, None, None])
    has = state.sums.by_rank[TRANS_IN][experts][:, to].T > 0
    new = ~has & (state.of.home[experts] != to[:, None])
    copies = np.maximum((state.copies[to][:, None] + new)[:, None], state.copies.max())
    transfers = copies * state.transfer_s[:, None, None, None]
    uneven = compute[0] ** 2 + compute[1] ** 2 - (state.compute[to] ** 2)[:, None, None]
    uneven += link[0] ** 2 + link[1] ** 2 - (state.link[to] ** 2)[:, None, None]
    score: Floats = busiest + fullest + state.exposed_s(transfers, busiest, state.level) + state.even * uneven
    score[moved <= 0] = np.inf
    refused = np.zeros_like(new)
    if state.max_copies is not None:
        refused |= new & (state.copies[to] >= state.max_copies)[:, None]
    if state.within is not None:
        refused |= ~state.within[experts][:, to].T
    score[np.broadcast_to(refused[:, None], score.shape)] = np.inf
    return score


def pulls(state: State, rank: int) -> Candidates:
    """Every expert whose tokens a rank sends away, computed by the rank itself.

    Args:
        state: the present placement.
        rank: which sends too much.
    """
    wanted = (state.columns[:, rank] != rank) & (state.of.rows[:, rank] > 0)
    if state.within is not None:
        wanted &= state.within[:, rank]
    experts = np.flatnonzero(wanted)
    columns = state.columns[experts].copy()
    columns[:, rank] = rank
    return Candidates(experts, columns)


def drops(state: State) -> Candidates:
    """Every copy given up: its lanes go home.

    Args:
        state: the present placement.
    """
    experts, ranks = np.nonzero(state.sums.by_rank[TRANS_IN])
    columns = state.columns[experts]
    return Candidates(experts, np.where(columns == ranks[:, None], state.of.home[experts][:, None], columns))


def largest_of_others(values: Floats, rank: int) -> Floats:
    """Largest value of all ranks but one and each other in turn, ``[R]``; 0 where none is left.

    Args:
        values: not below 0, ``[R]``.
        rank: the one.
    """
    rest = values.copy()
    rest[rank] = 0.0
    first = int(rest.argmax())
    found = np.full(len(rest), rest[first])
    rest[first] = 0.0
    found[first] = rest.max()
    return found
