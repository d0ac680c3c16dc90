"""What happens between batches where experts are shared out: what the last one was, who computes what in the next one.

All of it is decided from tables that every rank has alike. A layer's placement is planned by one rank of its stage, on
a thread, while the batch is still running; all ranks then hear of it at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch.distributed as dist

from scenarios.moe.measuring import measured_constants, renewed, samples_of
from scenarios.moe.placing import Constants, Lanes, LayerModel, WhenToPlan, balance, check_planner, plan, reroute
from scenarios.moe.sharded import Experts, SharedExperts, Sharing, share_experts
from scenarios.moe.telling import SharedBatch, tell, width
from scenarios.scenario import Engine, Report, State, gather_by_layer

Placement = Literal["static", "local", "fastermoe", "pro_prophet", "lanes"]

FIXED = ("static", "local")
"""Placements that are no plans."""

CHANGE = 0.1
"""By how much a placement must change what the busiest rank of a layer has to do, for its profiles to be forgotten."""

SEARCH_S, SEARCH_LANE_S = 3e-3, 5e-5
"""What a search among copies takes, and for each lane; it is a part of the batch, so there must be more to gain."""

VARYING = ("busiest rank", "busiest rank at home", "copies", "copied", "summed", "hidden", "planning")
"""Entries of the report that may differ between two runs with the same bits: plans depend on measured seconds."""


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


class ExpertBalancing:
    """Lets the replicas of a stage share experts out, batch by batch; all methods are collective over all ranks.

    Args:
        num_experts: of each layer.
        shapes: of an expert's matrices, ``(out, in)``; the first one's ``in`` is a row's size.
        placement: a name.
        plan_every: batches between two plans of a layer; there are more where its balance drifts.
        max_copies: most experts of others that a rank may hold; ``None``: any number.
    """

    def __init__(
        self, num_experts: int, shapes: Sequence[tuple[int, int]], placement: str, *, plan_every: int = 10,
        max_copies: int | None = None,
    ) -> None:
        self._num_experts, self._shapes, self._placement = num_experts, tuple(shapes), placement
        self._plan_every, self._max_copies = plan_every, max_copies
        self._group: dist.ProcessGroup | None = None
        self._sharing: Sharing | None = None
        self._lanes: dict[int, Lanes] = {}
        self._when: dict[int, WhenToPlan] = {}
        self._is_due: dict[int, bool] = {}
        self._constants: Constants | None = None
        self._warned: set[str] = set()
        self.last: SharedBatch | None = None

    def check_replicas(self, num_replicas: int) -> None:
        """Refuse what can't be placed on so many ranks.

        Args:
            num_replicas: that share the experts.

        Raises:
            ValueError: if there can be no placement.
        """
        if num_replicas > 1:
            check_planner(
                self._placement, num_ranks=num_replicas, num_experts=self._num_experts, max_copies=self._max_copies
            )

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

    def before_batch(self, engine: Engine) -> None:
        """Begin a batch: copies are on their way.

        Args:
            engine: of this rank.
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
        lanes = {index: self._lanes_of(index, self._sharing.num_ranks) for index in layers}
        due = [] if self._placement in FIXED else [index for index in layers if self._is_due.get(index, True)]
        self._sharing.begin(layers, lanes, engine.gradient_accumulation_steps(), due, self._plan)

    def after_batch(self, engine: Engine) -> None:
        """Hear of all layers what the batch was, and who computes what in the next one.

        Args:
            engine: of this rank.
        """
        sharing = self._sharing
        self.take_part(engine)  # re-packing may have changed the ranks
        if sharing is None:
            return
        told = {index: tell(layer, sharing.rank) for index, layer in sharing.take_done().items()}
        num_ranks, num_experts = sharing.num_ranks, self._num_experts
        numbers = {index: each.numbers for index, each in told.items()}
        table = gather_by_layer(engine, numbers, width(num_ranks, num_experts))
        self.last = last = SharedBatch.of(table, num_ranks, num_experts)
        if last.failed:
            self._warn(last.failed, [each.error for each in told.values() if each.error is not None])
        before = dict(self._lanes)
        self._lanes |= last.plans
        for layer in last.failed:
            self._lanes.pop(layer, None)
        self._decide_when(last)
        self._renew(engine, last)
        if self._changes_times(last, before):
            engine.expect_change()

    def report(self) -> Report:
        """What the last batch was.

        Returns:
            ``"busiest rank"``, rows of the busiest rank over the mean; ``"busiest rank at home"``, the same if all had
            been computed at home; ``"copies"`` of experts; MB of them that were ``"copied"`` and MB of sums of
            gradients that were ``"summed"``; ``"hidden"``, the share of both's time for which nobody waited;
            ``"planning"``, milliseconds, and how many of them somebody waited for. Bytes and seconds are sums over
            ranks.
        """
        last = self.last
        if last is None or not last.rows:
            return {}
        sums, at_home, placed = last.sums, last.balance_of({}), last.balance_of(last.lanes)
        report: Report = {
            "busiest rank": f"{placed:.2f} of mean",
            "busiest rank at home": f"{at_home:.2f} of mean",
            "copies": int(sums.copies),
            "copied": f"{sums.trans_bytes / 1e6:.2f} MB",
            "summed": f"{sums.agg_bytes / 1e6:.2f} MB",
        }
        if sums.trans_bytes or sums.agg_bytes:
            report["hidden"] = f"{sums.hidden_s / sums.travelled_s:.0%}"
        if sums.plan_s:
            report["planning"] = f"{1e3 * sums.plan_s:.0f} ms, {1e3 * sums.waited_s:.0f} waited"
        return report

    def state_dict(self) -> State:
        """Placements, and when each layer is planned next."""
        return {
            "lanes": {layer: str(lanes) for layer, lanes in self._lanes.items()},
            "when": {layer: when.state_dict() for layer, when in self._when.items()},
            "due": dict(self._is_due),
        }

    def load_state_dict(self, state: State) -> None:
        """Go on where :meth:`state_dict` was taken; placements for another number of replicas are left out."""
        self._lanes = {layer: Lanes.parse(text) for layer, text in state["lanes"].items()}
        self._is_due, self._when = dict(state["due"]), {}
        for layer, each in state["when"].items():
            self._when_of(layer).load_state_dict(each)

    # -- what is planned ----------------------------------------------------------------------

    def _lanes_of(self, layer: int, num_ranks: int) -> Lanes:
        """The placement of a layer's next batch."""
        first = (Lanes.local if self._placement == "local" else Lanes.static)(num_ranks, self._num_experts)
        lanes = self._lanes.get(layer, first)
        return lanes if lanes.num_ranks == num_ranks else first

    def _when_of(self, layer: int) -> WhenToPlan:
        return self._when.setdefault(layer, WhenToPlan(self._plan_every))

    @property
    def _model(self) -> LayerModel:
        assert self._constants is not None, "measured before the first batch"
        return LayerModel(self._constants)

    def _plan(self, layer: int, rows: list[list[int]]) -> Lanes:
        """Plan a layer's next batch; on one rank, on a thread."""
        present, earlier = self._lanes_of(layer, len(rows)), None
        if self.last is not None and layer in self.last.rows and len(self.last.rows[layer]) == len(rows):
            earlier = self.last.rows[layer].tolist()
        return plan(
            self._placement, rows, self._model, present=present, earlier=earlier, max_copies=self._max_copies
        )

    def _reroute(self, lanes: Lanes, rows: list[list[int]]) -> Lanes:
        """Spread the batch's own rows over the copies that there are; on all ranks of a stage alike."""
        if self._placement != "lanes" or not lanes.num_copies or not any(map(any, rows)):
            return lanes
        model = self._model
        whole = [[count * model.constants.num_micro_batches for count in row] for row in rows]
        try:
            if self._to_gain_s(model, lanes, whole) <= SEARCH_S + SEARCH_LANE_S * len(rows) * self._num_experts:
                return lanes
            found = reroute(lanes, whole, model)
            _check_copies(found, lanes)
            return found
        except Exception as error:  # noqa: BLE001 - it is the planner's, the same on all ranks
            assert self._sharing is not None
            text = f"rows were not spread over the copies of experts ({type(error).__name__}: {error})"
            self._warn_once(text, says=self._sharing.rank == 0)
            return lanes

    @staticmethod
    def _to_gain_s(model: LayerModel, lanes: Lanes, rows: list[list[int]]) -> float:
        """Seconds that a batch would save at most if all ranks had as much to do."""
        return model.predict(lanes, rows).compute_s * (1.0 - 1.0 / balance(lanes, rows))

    def _decide_when(self, last: SharedBatch) -> None:
        """Which layers are planned in the next batch, for the one after it."""
        for layer, rows in last.rows.items():
            self._is_due[layer] = self._when_of(layer).due(balance(last.lanes[layer], rows.tolist()))

    def _renew(self, engine: Engine, last: SharedBatch) -> None:
        """Let the batch's own times count; on all ranks alike."""
        if self._constants is None or self._placement in FIXED or not last.rows:
            return
        rows, times = ([table.tolist() for table in tables.values()] for tables in (last.rows, last.times))
        try:
            samples = samples_of(list(last.rows), rows, last.lanes, times)
            self._constants = renewed(self._constants, samples, self._rest_s(engine, last, rows, times))
        except Exception as error:  # noqa: BLE001 - odd times are no reason to stop
            text = f"what a batch took was left out ({type(error).__name__}: {error})"
            self._warn_once(text, says=dist.get_rank() == 0)

    def _rest_s(
        self, engine: Engine, last: SharedBatch, rows: Sequence[Any], times: Sequence[Any]
    ) -> tuple[float, float] | None:
        """Seconds of a block's forwards and backwards without its experts, if blocks were profiled."""
        profile, model = engine.last_batch_profile, self._model
        if profile is None:
            return None
        blocks_s = sum(profile.layers[layer].seconds for layer in last.rows) * engine.gradient_accumulation_steps()
        experts_s = sum(max(forward_s) + max(backward_s) for forward_s, backward_s, *_ in times)
        if not experts_s:  # not measured here
            pairs = zip(last.rows, rows, strict=True)
            experts_s = sum(model.predict(last.lanes[layer], table).compute_s for layer, table in pairs)
        forward_s = max(0.0, blocks_s - experts_s) / (3 * len(last.rows))
        return forward_s, 2 * forward_s

    def _changes_times(self, last: SharedBatch, before: Mapping[int, Lanes]) -> bool:
        """Whether the busiest rank of some layer will have so much more or less to do that profiles tell nothing."""
        for layer in last.plans.keys() & last.rows.keys():
            rows = last.rows[layer].tolist()
            were, are = (
                balance(lanes.get(layer, Lanes.static(len(rows), self._num_experts)), rows)
                for lanes in (before, self._lanes)
            )
            if abs(were - are) > CHANGE * were:
                return True
        return False

    # -- further ------------------------------------------------------------------------------

    def _make(self, engine: Engine, group: dist.ProcessGroup) -> Sharing:
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, dist.get_process_group_ranks(group))
        mine = None
        for ranks in sorted({tuple(ranks) for ranks in everybody}):  # each group is made by all ranks
            made = dist.new_group(list(ranks), backend="gloo"), dist.new_group(list(ranks))
            mine = made if dist.get_rank() in ranks else mine
        assert mine is not None
        dtype, sum_dtype = engine.get_data_types()
        if self._placement not in FIXED:
            self._constants = measured_constants(
                group, self._shapes, dtype=dtype, sum_dtype=sum_dtype, device=engine.device,
                num_micro_batches=engine.gradient_accumulation_steps(),
            )
        return Sharing(
            group, *mine, num_experts=self._num_experts, device=engine.device, sum_dtype=sum_dtype,
            reroute=self._reroute,
        )

    def _warn(self, layers: Sequence[int], errors: Sequence[str]) -> None:
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, list(errors))
        texts = [text for found in everybody for text in found]
        self._warn_once(
            f"the planner failed ({texts[0]}), so experts of layers {list(layers)} are computed at home in the next "
            "batch", says=dist.get_rank() == 0,
        )  # fmt: skip

    def _warn_once(self, message: str, *, says: bool) -> None:
        kind = message.partition("(")[0]
        if kind not in self._warned and says:
            warnings.warn(
                f"scenario.placement={self._placement}: {message}; further ones will not be reported", stacklevel=2
            )
        self._warned.add(kind)


def _check_copies(lanes: Lanes, planned: Lanes) -> None:
    for expert in range(lanes.num_experts):
        if not set(lanes.holders(expert)) <= set(planned.holders(expert)):
            raise ValueError(f"{lanes} needs copies of expert {expert} that {planned} has not")
