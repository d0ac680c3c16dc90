"""What the ranks tell each other of a batch of shared experts: a row of numbers for each layer, added up over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from scenarios.moe.placing import Lanes, balance
from scenarios.moe.sharded import LayerBatch

PLAN_LIMIT_S = 60.0
"""Longest wait for a plan."""

NOTHING, PLANNED, FAILED = 0.0, 1.0, 2.0


class Sums(NamedTuple):
    """Over ranks, of a layer or of several.

    Attributes:
        copies: experts that are no rank's own.
        trans_bytes: weights that travelled.
        agg_bytes: sums of gradients that travelled.
        travelled_s: seconds that both took.
        hidden_s: those of them for which nobody waited.
        plan_s: seconds of planning.
        waited_s: those of them for which a rank waited.
    """

    copies: float = 0.0
    trans_bytes: float = 0.0
    agg_bytes: float = 0.0
    travelled_s: float = 0.0
    hidden_s: float = 0.0
    plan_s: float = 0.0
    waited_s: float = 0.0


class _Fields(NamedTuple):
    """Where things are in a row: what only one rank knows is 0 on all others."""

    rows: slice
    lanes: slice
    plan: slice
    times: slice
    sums: slice
    flag: int
    width: int

    @classmethod
    def of(cls, num_ranks: int, num_experts: int) -> _Fields:
        size, ends = num_ranks * num_experts, [0]
        for length in (size, size, size, 5 * num_ranks, len(Sums._fields), 1):
            ends.append(ends[-1] + length)
        rows, lanes, plan, times, sums, _ = (slice(first, end) for first, end in pairwise(ends))
        return cls(rows, lanes, plan, times, sums, flag=ends[-2], width=ends[-1])


class Told(NamedTuple):
    """What a rank tells of a layer.

    Attributes:
        numbers: the row.
        error: why there is no plan, if the planner has raised.
    """

    numbers: list[float]
    error: str | None


def width(num_ranks: int, num_experts: int) -> int:
    """Numbers of a row."""
    return _Fields.of(num_ranks, num_experts).width


def tell(layer: LayerBatch, rank: int) -> Told:
    """Put a layer's batch into numbers; waits for its plan.

    Args:
        layer: of this rank.
        rank: within the group that shares the experts.
    """
    num_ranks, num_experts = layer.lanes.num_ranks, layer.lanes.num_experts
    where, row, error = _Fields.of(num_ranks, num_experts), [0.0] * width(num_ranks, num_experts), None
    own = slice(rank * num_experts, (rank + 1) * num_experts)
    row[where.rows.start + own.start : where.rows.start + own.stop] = map(float, layer.rows[rank])
    row[where.lanes.start + own.start : where.lanes.start + own.stop] = map(float, layer.lanes.owner[rank])
    if layer.times is not None:
        row[where.times.start + rank : where.times.stop : num_ranks] = astuple(layer.times)
    plan_s = waited_s = 0.0
    if layer.plan is not None:
        try:
            planned = layer.plan.wait(PLAN_LIMIT_S)
            planned.check(num_ranks, num_experts)
            row[where.plan] = [float(owner) for owners in planned.owner for owner in owners]
            row[where.flag] = PLANNED
        except Exception as raised:  # noqa: BLE001 - a planner may raise anything
            row[where.flag], error = FAILED, f"{type(raised).__name__}: {raised}"
        plan_s, waited_s = layer.plan.seconds, layer.plan.waited_s
    row[where.sums] = map(float, Sums(layer.num_copies, *layer.travelled, plan_s, waited_s))
    return Told(row, error)


@dataclass(frozen=True)
class SharedBatch:
    """What a batch was for the layers with experts, the same on every rank.

    Attributes:
        rows: by layer, of each rank for each expert, ``[R, E]``; layers that were trained alone.
        lanes: by layer, who has computed them.
        times: by layer, ``[5, R]``: seconds of forwards, backwards, exchanges, Trans and Agg.
        sums: over layers.
        plans: by layer, for those that were planned.
        failed: layers whose planner has raised.
    """

    rows: Mapping[int, Tensor]
    lanes: Mapping[int, Lanes]
    times: Mapping[int, Tensor]
    sums: Sums
    plans: Mapping[int, Lanes]
    failed: Sequence[int]

    @classmethod
    def of(cls, table: Tensor, num_ranks: int, num_experts: int) -> SharedBatch:
        """Read what all ranks have told.

        Args:
            table: a row for each layer of the model, added up.
            num_ranks: that share the experts of a layer.
            num_experts: of a layer.
        """
        where = _Fields.of(num_ranks, num_experts)

        def matrix(layer: int, part: slice) -> Tensor:
            return table[layer, part].view(-1, num_ranks if part == where.times else num_experts)

        def lanes(layer: int, part: slice) -> Lanes:
            return Lanes(tuple(map(tuple, matrix(layer, part).long().tolist())))

        trained = torch.nonzero(table[:, where.rows].sum(1)).flatten().tolist()
        flags = table[:, where.flag].tolist()
        return cls(
            rows={layer: matrix(layer, where.rows) for layer in trained},
            lanes={layer: lanes(layer, where.lanes) for layer in trained},
            times={layer: matrix(layer, where.times) for layer in trained},
            sums=Sums(*table[:, where.sums].sum(0).tolist()),
            plans={layer: lanes(layer, where.plan) for layer, flag in enumerate(flags) if flag == PLANNED},
            failed=[layer for layer, flag in enumerate(flags) if flag == FAILED],
        )

    def balance_of(self, lanes: Mapping[int, Lanes]) -> float:
        """Rows of the busiest rank over the mean under a placement, averaged over layers; 1 without any.

        Args:
            lanes: by layer; static for one that is not there.
        """
        found = [
            balance(lanes.get(layer, Lanes.static(*rows.shape)), rows.tolist()) for layer, rows in self.rows.items()
        ]
        return sum(found) / len(found) if found else 1.0
