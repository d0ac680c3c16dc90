"""A placement while it is searched: its seconds, and those of any placement that differs in one expert."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from scenarios.moe.placing.columns import (
    AGG_IN,
    AGG_OUT,
    COMPUTE,
    INBOUND,
    OUTBOUND,
    TRANS_IN,
    TRANS_OUT,
    Columns,
    Sums,
)
from scenarios.moe.placing.model import LayerModel
from scenarios.moe.placing.traffic import Flags, Floats, Ints

EVEN = 0.005
"""Weight of how evenly ranks are loaded beside the seconds of the layer: what leads a search across a tie of ranks."""


@dataclass(frozen=True)
class Candidates:
    """Placements that differ from the present one in one expert each.

    Args:
        experts: which, ``[N]``.
        columns: its owners by source, ``[N, R]``.
    """

    experts: Ints
    columns: Ints

    def __len__(self) -> int:
        return len(self.experts)


def joined(candidates: Sequence[Candidates]) -> Candidates:
    """All of some candidates, in order.

    Args:
        candidates: at least one.
    """
    return Candidates(
        np.concatenate([one.experts for one in candidates]), np.concatenate([one.columns for one in candidates])
    )


class State:
    """A placement and its sums.

    Args:
        model: what is minimised.
        loads: rows of every lane, ``[R, E]``.
        owner: rank of every lane, ``[R, E]``.
        max_copies: of a rank; ``None``: any number.
        within: which ranks may compute which expert, ``[E, R]``, their weights being there: Trans costs nothing then;
            ``None``: any, and Trans costs what the model says.

    Attributes:
        level: transfers a link may carry for nothing in the search's objective. The first copy of a rank often costs
            more than it saves, and many others then cost nothing: a search that goes up level by level gets there.
        columns: rank of every lane, ``[E, R]``.
        seconds: of the layer, as the model says.
        objective: what the search minimises.
    """

    def __init__(
        self, model: LayerModel, loads: Floats, owner: Ints, max_copies: int | None = None, within: Flags | None = None
    ) -> None:
        self.model, self.max_copies, self.within = model, max_copies, within
        self.num_ranks, self.num_experts = loads.shape
        self.of = Columns(model, loads)
        constants = model.constants
        num_bytes = np.array([constants.expert_bytes, constants.agg_bytes])
        piece = num_bytes if constants.piece_bytes is None else np.minimum(num_bytes, constants.piece_bytes)
        links = constants.trans_link, constants.sums_link
        byte_s, message_s = np.array([(link.byte_s, link.message_s) for link in links]).T
        self.transfer_s = message_s + num_bytes * byte_s
        self.fill_s = message_s + piece * byte_s
        self.start_s = np.array([link.start_s for link in links])
        if within is not None:
            self.transfer_s[0] = self.fill_s[0] = self.start_s[0] = 0.0
        self.sum_s = np.array([0.0, constants.sum_s])
        self.messages_s = 4 * constants.num_micro_batches * constants.message_s
        self.even = EVEN / max(float(self.of.lane_s.sum()), 1e-300)
        self.level = 0
        self.columns = np.ascontiguousarray(owner.T)
        self.sums = self.of.sums(self.columns, np.arange(self.num_experts))
        self.add_up()

    @property
    def owner(self) -> Ints:
        """Rank of every lane, ``[R, E]``; a copy."""
        owner: Ints = self.columns.T.copy()
        return owner

    def add_up(self) -> None:
        """Sum over the experts, after a column or :attr:`level` changed."""
        self.totals = self.sums.by_rank.sum(axis=1)
        self.compute, self.copies = self.totals[COMPUTE], self.totals[TRANS_IN]
        self.link = np.maximum(self.totals[INBOUND], self.totals[OUTBOUND])
        seconds, objective = self._evaluate(self.totals[:, None], self.sums.hops.max(axis=1)[:, None])
        self.seconds, self.objective = float(seconds[0]), float(objective[0])

    def evaluate(self, candidates: Candidates) -> tuple[Floats, Floats, Sums]:
        """Predict placements that differ in one expert.

        Args:
            candidates: N of them.

        Returns:
            The layer's seconds and the search's objective of each, ``[N]``, infinite above ``max_copies``; and the
            columns' sums.
        """
        sums = self.of.sums(candidates.columns, candidates.experts)
        totals = self.totals[:, None] - self.sums.by_rank[:, candidates.experts] + sums.by_rank
        hops = np.maximum(sums.hops, self._hops_without(candidates.experts))
        seconds, objective = self._evaluate(totals, hops)
        if self.max_copies is not None:
            over = (totals[TRANS_IN] > self.max_copies).any(axis=1)
            seconds[over] = objective[over] = np.inf
        return seconds, objective, sums

    def take(self, candidates: Candidates, sums: Sums, which: int) -> None:
        """Make one of some candidates the present placement.

        Args:
            candidates: of :meth:`evaluate`.
            sums: what it returned.
            which: index of the candidate.
        """
        expert = candidates.experts[which]
        self.columns[expert] = candidates.columns[which]
        self.sums.by_rank[:, expert] = sums.by_rank[:, which]
        self.sums.hops[:, expert] = sums.hops[:, which]
        self.add_up()

    def exposed_s(self, transfers_s: Floats, busiest_s: Floats, level: int) -> Floats:
        """What is left of Trans and Agg (equation 8).

        Args:
            transfers_s: of both, ``[2, ...]``.
            busiest_s: of the rank that computes longest.
            level: transfers that count nothing.

        Returns:
            Seconds of both together.
        """
        free_s = level * self.transfer_s + (level > 0) * self.start_s
        hidden_s = free_s[0], free_s[1]
        if self.model.overlapped:
            constants = self.model.constants
            forward_s = constants.forward_share * busiest_s
            hidden_s = (
                np.maximum(hidden_s[0], forward_s + constants.rest_forward_s),
                np.maximum(hidden_s[1], busiest_s - forward_s + constants.rest_backward_s),
            )
        exposed: Floats = np.maximum(0.0, transfers_s[0] - hidden_s[0]) + np.maximum(0.0, transfers_s[1] - hidden_s[1])
        return exposed

    def _hops_without(self, experts: Ints) -> Floats:
        """Longest chains of all experts but one each, ``[2, N]``."""
        hops = self.sums.hops
        if self.num_experts == 1:
            return np.zeros((2, len(experts)))
        second = np.partition(hops, -2, axis=1)[:, -2:]
        return np.where(experts == hops.argmax(axis=1)[:, None], second[:, :1], second[:, 1:])

    def _evaluate(self, totals: Floats, hops: Floats) -> tuple[Floats, Floats]:
        """Seconds and objective of N placements by their sums ``[7, N, R]`` and longest chains ``[2, N]``."""
        most = totals.max(axis=2)
        busiest_s = most[COMPUTE]
        links = np.maximum(most[[TRANS_IN, AGG_IN]], most[[TRANS_OUT, AGG_OUT]])
        transfers_s = links * self.transfer_s[:, None] + np.maximum(hops - 1, 0) * self.fill_s[:, None]
        transfers_s += self.sum_s[:, None] + (hops > 0) * self.start_s[:, None]
        fullest_s = np.maximum(most[INBOUND], most[OUTBOUND])
        plain_s = busiest_s + fullest_s + (fullest_s > 0) * self.messages_s + self.model.constants.fixed_s
        seconds = plain_s + self.exposed_s(transfers_s, busiest_s, 0)
        looked_at = seconds if not self.level else plain_s + self.exposed_s(transfers_s, busiest_s, self.level)
        links = np.maximum(totals[INBOUND], totals[OUTBOUND])
        copies = totals[TRANS_IN] * self.transfer_s.sum()
        uneven = (totals[COMPUTE] ** 2 + links**2 + copies**2).sum(axis=1)
        return seconds, looked_at + self.even * uneven
