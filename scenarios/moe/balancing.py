"""What happens between batches where experts are shared out: what the last one was, who computes what in the next one.

All of it is decided from tables that every rank has alike. A layer's placement is planned by one rank of its stage, on
a thread, while the batch is still running; all ranks then hear of it at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from scenarios.moe.placing import Lanes
from scenarios.moe.sharded import Experts, LayerBatch, Planner, Reroute, SharedExperts, Sharing, share_experts
from scenarios.scenario import Engine, Report, gather_by_layer

PLANNERS = ("fastermoe", "pro_prophet", "lanes")
"""Placements that are planned anew; of the others, ``"static"`` is all at home and ``"local"`` none anywhere else."""

Placement = Literal["static", "local", "fastermoe", "pro_prophet", "lanes"]

DRIFT = 1.1
"""By how much more than planned the busiest rank may have to do, over the mean, before another plan is made."""

CHANGE = 0.1
"""By how much a placement must change what the busiest rank of a layer has to do, for its profiles to be forgotten."""

VARYING = ("busiest rank", "copies", "copied", "summed", "hidden", "measured")
"""Entries of the report that may differ between two runs with the same bits: plans depend on measured seconds."""


@dataclass(frozen=True)
class SharedBatch:
    """What the last batch was for the layers with experts, the same on every rank.

    Attributes:
        layers: their indices.
        rows: of each rank for each expert, ``[layers, R, E]``.
        computed: rows that each rank has computed, ``[layers, R]``.
        copies: experts that are no rank's own, of all ranks together.
        trans_bytes: weights that travelled, of all ranks.
        agg_bytes: sums of gradients that travelled, of all ranks.
        travelled_s: seconds that both took, of all ranks together.
        hidden_s: those of them for which nobody waited.
        plan_s: seconds of planning, of all ranks together.
        waited_s: those of them for which a rank waited.
    """

    layers: tuple[int, ...]
    rows: Tensor
    computed: Tensor
    copies: int
    trans_bytes: int
    agg_bytes: int
    travelled_s: float
    hidden_s: float
    plan_s: float
    waited_s: float

    @property
    def at_home(self) -> Tensor:
        """Rows that each rank would have computed if all were computed at home, ``[layers, R]``."""
        num_layers, num_ranks, num_experts = self.rows.shape
        return self.rows.sum(1).view(num_layers, num_ranks, num_experts // num_ranks).sum(2)


def placement_problems(placement: str, *, sharded: bool, plan_every: int, max_copies: int | None) -> list[str]:
    """List what is wrong with settings of a placement.

    Args:
        placement: its name.
        sharded: whether experts are shared out.
        plan_every: batches between two plans.
        max_copies: of a rank.
    """
    problems = []
    if placement not in get_args(Placement):
        problems.append(f"placement={placement!r} must be one of {', '.join(get_args(Placement))}")
    elif placement != "static" and not sharded:
        problems.append(
            f"placement={placement} places experts, and expert_weights=replicated gives all of them to every rank: set "
            "expert_weights=sharded, or placement=static"
        )
    if plan_every < 1:
        problems.append(f"plan_every={plan_every} must be at least 1")
    if max_copies is not None and max_copies < 0:
        problems.append(f"max_copies={max_copies} must be 0 or more, or null for any number")
    return problems


def balancing(num_experts: int, placement: str, *, plan_every: int, max_copies: int | None) -> ExpertBalancing:
    """What shares experts out as a scenario's settings say.

    Args:
        num_experts: of each layer.
        placement: a name.
        plan_every: batches between two plans.
        max_copies: of a rank.
    """
    return ExpertBalancing(num_experts, placement, plan_every=plan_every)


def imbalance(computed: Tensor) -> float:
    """Rows of the busiest rank over the mean, averaged over the layers that have any; ``[layers, R]``."""
    computed = computed[computed.sum(1) > 0]
    return float((computed.max(dim=1).values / computed.mean(dim=1)).mean()) if len(computed) else 1.0


class ExpertBalancing:
    """Lets the replicas of a stage share experts out, batch by batch; all methods are collective over all ranks.

    Args:
        num_experts: of each layer.
        placement: a name.
        plan: makes a placement, for :data:`PLANNERS`.
        plan_every: batches between two plans; there are more where the balance drifts.
        reroute: see :class:`~scenarios.moe.sharded.Sharing`.
    """

    def __init__(
        self, num_experts: int, placement: str, *, plan: Planner | None = None, plan_every: int = 1,
        reroute: Reroute | None = None,
    ) -> None:
        self._num_experts, self._placement, self._plan, self._plan_every = num_experts, placement, plan, plan_every
        self._reroute = reroute
        self._group: dist.ProcessGroup | None = None
        self._sharing: Sharing | None = None
        self._lanes: dict[int, Lanes] = {}
        self._promised: float | None = None
        self._has_drifted = self._has_warned = False
        self.last: SharedBatch | None = None

    def take_part(self, engine: Engine) -> None:
        """Make the ranks of this stage known; quick where they are known already.

        Args:
            engine: of this rank.
        """
        group = engine.mpu.get_data_parallel_group() if dist.is_initialized() else None
        if group is not self._group:
            if self._sharing is not None:
                self._sharing.close()
            self._group, self._sharing = group, None
            if group is not None and dist.get_world_size(group) > 1:
                self._sharing = self._make(engine, group)
        share_experts(self._sharing)

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Begin a batch.

        Args:
            engine: of this rank.
            batch: counted from 0.
        """
        self.take_part(engine)
        if self._sharing is None:
            return
        layers = {
            index: Experts(module, own)
            for index, layer in engine.local_layers().items()
            for module in layer.modules()
            if isinstance(module, SharedExperts) and (own := module.expert_weights())
        }
        num_ranks = self._sharing.num_ranks
        first = Lanes.local if self._placement == "local" else Lanes.static
        lanes = {index: self._lanes.get(index, first(num_ranks, self._num_experts)) for index in layers}
        is_due = self._plan is not None and (batch % self._plan_every == 0 or self._has_drifted)
        self._sharing.begin(layers, lanes, engine.gradient_accumulation_steps(), self._plan if is_due else None)

    def after_batch(self, engine: Engine) -> None:
        """Hear of all layers what the batch was, and who computes what in the next one.

        Args:
            engine: of this rank.
        """
        if self._sharing is None:
            self.take_part(engine)
            return
        done, num_ranks, rank = self._sharing.take_done(), self._sharing.num_ranks, self._sharing.rank
        self.take_part(engine)  # re-packing may have changed the ranks
        rows_of = {index: _Row.of(layer, rank, num_ranks, self._num_experts) for index, layer in done.items()}
        width = _Row.width(num_ranks, self._num_experts)
        table = gather_by_layer(engine, {index: row.numbers for index, row in rows_of.items()}, width)
        self.last = _summed(table, num_ranks, self._num_experts)
        self._take_plans(engine, table, {index: row.error for index, row in rows_of.items() if row.error})

    def report(self) -> Report:
        """What the last batch was.

        Returns:
            ``"busiest rank"``, rows of the busiest rank over the mean, if all were computed at home and as they were;
            ``"copies"`` of experts; MB of them that were ``"copied"`` and MB of sums of gradients that were
            ``"summed"``; ``"hidden"``, the share of both's time for which nobody waited.
        """
        last = self.last
        if last is None:
            return {}
        hidden = f"{last.hidden_s / last.travelled_s:.0%}" if last.travelled_s and last.copies else "nothing to hide"
        return {
            "busiest rank": f"{imbalance(last.at_home):.2f} at home, {imbalance(last.computed):.2f} as placed",
            "copies": last.copies,
            "copied": f"{last.trans_bytes / 1e6:.2f} MB",
            "summed": f"{last.agg_bytes / 1e6:.2f} MB",
            "hidden": hidden,
        }

    # -- further ------------------------------------------------------------------------------

    def _make(self, engine: Engine, group: dist.ProcessGroup) -> Sharing:
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, dist.get_process_group_ranks(group))
        mine = None
        for ranks in sorted({tuple(ranks) for ranks in everybody}):  # each group is made by all ranks
            made = dist.new_group(ranks, backend="gloo"), dist.new_group(ranks)
            mine = made if dist.get_rank() in ranks else mine
        assert mine is not None
        return Sharing(
            group, *mine, num_experts=self._num_experts, device=engine.device, sum_dtype=engine.get_data_types()[1],
            reroute=self._reroute,
        )

    def _take_plans(self, engine: Engine, table: Tensor, errors: Mapping[int, str]) -> None:
        """Take the placements that were planned; static for a layer whose planner has failed."""
        if self._sharing is None or self.last is None:
            return
        num_ranks, before = self._sharing.num_ranks, dict(self._lanes)
        size = num_ranks * self._num_experts
        if table.shape[1] != _Row.width(num_ranks, self._num_experts):
            self._lanes = {}
            return
        flags = table[:, -1 - size]
        for layer in torch.nonzero(flags == PLANNED).flatten().tolist():
            owner = table[layer, -size:].long().view(num_ranks, -1).tolist()
            self._lanes[layer] = Lanes(tuple(map(tuple, owner)))
        failed = torch.nonzero(flags == FAILED).flatten().tolist()
        for layer in failed:
            self._lanes.pop(layer, None)
        if failed:
            self._warn(failed, errors)
        if bool((flags == PLANNED).any()):
            self._promised = imbalance(_computed(self.last.rows, self.last.layers, self._lanes))
        achieved = imbalance(self.last.computed)
        self._has_drifted = self._promised is not None and achieved > DRIFT * self._promised
        if self._changes_times(before):
            engine.expect_change()

    def _changes_times(self, before: Mapping[int, Lanes]) -> bool:
        """Whether the busiest rank of some layer will have so much more or less to do that its time tells nothing."""
        assert self.last is not None
        were, are = (_computed(self.last.rows, self.last.layers, lanes) for lanes in (before, self._lanes))
        pairs = zip(were.tolist(), are.tolist(), strict=True)
        return any(abs(max(old) - max(new)) > CHANGE * max(old) for old, new in pairs)

    def _warn(self, layers: list[int], errors: Mapping[int, str]) -> None:
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, dict(errors))
        texts = [text for found in everybody for text in found.values()]
        if not self._has_warned and dist.get_rank() == 0:
            warnings.warn(
                f"scenario.placement={self._placement}: the planner failed ({texts[0]}); experts of layers {layers} "
                "are computed at home in the next batch, and further failures will not be reported", stacklevel=2,
            )  # fmt: skip
        self._has_warned = True


NOTHING, PLANNED, FAILED = 0, 1, 2


@dataclass(frozen=True)
class _Row:
    """What one rank tells of one layer.

    Attributes:
        numbers: rows of each rank for each expert (its own), rows computed by each rank (its own), six sums over
            ranks, whether there is a plan, and the plan.
        error: why there is none.
    """

    numbers: list[float]
    error: str | None = None

    @staticmethod
    def width(num_ranks: int, num_experts: int) -> int:
        return 2 * num_ranks * num_experts + num_ranks + NUM_SUMS + 1

    @classmethod
    def of(cls, layer: LayerBatch, rank: int, num_ranks: int, num_experts: int) -> _Row:
        rows = [0.0] * (num_ranks * num_experts)
        rows[rank * num_experts : (rank + 1) * num_experts] = layer.rows[rank]
        computed = [0.0] * num_ranks
        lanes, travelled = layer.lanes, layer.travelled
        computed[rank] = sum(
            count
            for source, counts in enumerate(layer.rows)
            for expert, count in enumerate(counts)
            if lanes.owner[source][expert] == rank
        )
        plan, flag, error = [0.0] * (num_ranks * num_experts), NOTHING, None
        if layer.plan is not None:
            try:
                planned = layer.plan.wait(PLAN_LIMIT_S)
                planned.check(num_ranks, num_experts)
                plan, flag = [float(owner) for row in planned.owner for owner in row], PLANNED
            except Exception as raised:  # noqa: BLE001 - a planner may raise anything
                flag, error = FAILED, f"{type(raised).__name__}: {raised}"
        seconds = (0.0, 0.0) if layer.plan is None else (layer.plan.seconds, layer.plan.waited_s)
        sums = [len(lanes.copies(rank)), *travelled, *seconds]
        return cls([*rows, *computed, *map(float, sums), float(flag), *plan], error)


NUM_SUMS = 7
PLAN_LIMIT_S = 60.0


def _summed(table: Tensor, num_ranks: int, num_experts: int) -> SharedBatch:
    size = num_ranks * num_experts
    layers = torch.nonzero(table[:, :size].sum(1)).flatten()
    rows, computed = table[layers, :size].view(-1, num_ranks, num_experts), table[layers, size : size + num_ranks]
    sums = table[:, size + num_ranks :][:, :NUM_SUMS].sum(0).tolist()
    copies, trans_bytes, agg_bytes = map(int, sums[:3])
    return SharedBatch(tuple(layers.tolist()), rows, computed, copies, trans_bytes, agg_bytes, *sums[3:])


def _computed(rows: Tensor, layers: Sequence[int], lanes: Mapping[int, Lanes]) -> Tensor:
    """Rows that each rank computes under a placement, ``[layers, R]``."""
    _, num_ranks, num_experts = rows.shape
    found = []
    for table, layer in zip(rows, layers, strict=True):
        owner = torch.tensor(lanes.get(layer, Lanes.static(num_ranks, num_experts)).owner)
        found.append(torch.zeros(num_ranks, dtype=rows.dtype).index_add_(0, owner.flatten(), table.flatten()))
    return torch.stack(found) if found else rows.new_zeros(0, num_ranks)
