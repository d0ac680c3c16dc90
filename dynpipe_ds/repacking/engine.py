"""What the engine does to train on fewer ranks: decide, shrink, renew what is counted by stage."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from dynpipe_ds.balancing import BalancingEngine
from dynpipe_ds.decide.controller import Controller
from dynpipe_ds.events import RepackEvent
from dynpipe_ds.host.data_position import ReadingEngine
from dynpipe_ds.modes import in_ordinary_mode
from dynpipe_ds.ranks.agreement import same_everywhere
from dynpipe_ds.release import Constraints, ReleaseError
from dynpipe_ds.repacking.decision import Refusal, Repacking, fewest_stages, first_fit, to_stages
from dynpipe_ds.repacking.giving_back import GivingBack
from dynpipe_ds.repacking.live import RepackError, Shrink
from dynpipe_ds.repacking.request import Request
from dynpipe_ds.repacking.survivors import Workers
from dynpipe_ds.telling import warn

_SHARE_FOR_PLANNING = 0.01
"""Deciding may cost this share of training: where it takes long, it is done less often."""

Decide = Callable[[Request], Repacking | Refusal]

_engines: weakref.WeakSet[Any] = weakref.WeakSet()


class RepackingEngine(BalancingEngine, ReadingEngine):
    """A pipeline engine whose number of stages can shrink; base of the dynamic engine."""

    def _start_repacking(self) -> None:
        self._giving_back = GivingBack(self.dynamic_config.repack.release, self.device)
        self._repack_callbacks: list[Callable[[RepackEvent], Any]] = []
        self._wished_stages: int | None = None
        self._next_repack_batch = self.dynamic_config.repack.earliest_batch
        _engines.add(self)

    # -- public API ---------------------------------------------------------------------------

    def on_repack(self, callback: Callable[[RepackEvent], Any]) -> Callable[[RepackEvent], Any]:
        """Call a function on every rank after re-packing, also on those that leave; usable as a decorator.

        Args:
            callback: gets a :class:`RepackEvent`. On a rank that leaves, its ``released`` is true, no
                collective works any more, and the process ends with exit code 0 when the callbacks return.

        Returns:
            The callback.
        """
        self._need_dynamic("on_repack")
        self._repack_callbacks.append(callback)
        return callback

    @in_ordinary_mode
    def repack(self, num_stages: int) -> RepackEvent:
        """Go on with fewer stages, whatever throughput that costs; collective over all ranks.

        The ranks that are not needed any more leave: on them this call does not return, the process ends with
        exit code 0. Those that stay are numbered anew, in their order.

        Args:
            num_stages: n, at least 1 and fewer than now.

        Returns:
            What happened.

        Raises:
            RuntimeError: if no batch was profiled yet.
            RepackError: on every rank, if it can't be done or failed; training can go on with all ranks.
        """
        self._need_dynamic("repack")
        if not self._controller.newest:
            raise RuntimeError("there is no profile to re-pack by; train one batch first")
        started = time.perf_counter()
        chosen = self._choose_workers(lambda request: to_stages(request, num_stages))
        if isinstance(chosen, Refusal):
            raise RepackError(f"re-packing to {num_stages} stages is not possible: {chosen.reason}")
        return self._shrink(chosen, time.perf_counter() - started)

    def destroy(self) -> None:
        """As DeepSpeed's; the process groups are then this engine's no more."""
        _engines.discard(self)
        super().destroy()

    # -- deciding -----------------------------------------------------------------------------

    def _wants_profile(self) -> bool:
        """Whether the next batch is profiled, the same on every rank: a shrink is confirmed by new profiles only."""
        batch, window = self._num_batches, self.dynamic_config.profile_batches
        confirms = self._wished_stages is not None and self._next_repack_batch - batch < window
        return self._controller.wants_profile(batch) or (confirms and not self._controller.is_held(batch))

    def _maybe_repack(self) -> None:
        """Shrink if the configuration asks for it; a failure leaves training going on with all ranks."""
        config, batch = self.dynamic_config.repack, self._num_batches - 1
        ready = len(self._controller.newest) >= self.dynamic_config.profile_batches
        if not config.enabled or not ready or self.num_stages == 1 or batch < self._next_repack_batch:
            return
        if self._controller.is_held(batch):
            return
        started = time.perf_counter()
        try:
            chosen = self._choose_workers(self._decide)
            plan_s = self._agreed_cost(time.perf_counter() - started)
            wanted = self._is_wanted(chosen)
            self._next_repack_batch = batch + self._batches_until_next_decision(plan_s)
            if wanted:
                assert isinstance(chosen, Repacking)
                self._shrink(chosen, plan_s)
            else:
                self.overhead.planning_s += plan_s
        except (RepackError, ReleaseError) as error:  # raised only before the point of no return
            self._next_repack_batch = 2 * batch + 8
            self._warn_once(f"re-packing after batch {self._num_batches} failed ({error})", "repack")

    def _agreed_cost(self, seconds: float) -> float:
        cost = torch.tensor([seconds], dtype=torch.float64, device=self.device)
        dist.all_reduce(cost, op=dist.ReduceOp.MAX)
        return float(cost.item())

    def _batches_until_next_decision(self, plan_s: float) -> int:
        """Soon, if only the confirmation is missing; else as deciding can be afforded."""
        batch_s = max((stage.batch_s for stage in self._controller.newest[-1].stages), default=0.0) or plan_s
        affordable = 0 if self._wished_stages is not None else math.ceil(plan_s / (_SHARE_FOR_PLANNING * batch_s))
        return max(self.dynamic_config.profile_batches, affordable)

    def _decide(self, request: Request) -> Repacking | Refusal:
        config = self.dynamic_config.repack
        if config.method == "first_fit":
            return first_fit(request, target_stages=config.target_stages, min_stages=config.min_stages)
        if config.target_stages is not None:
            return to_stages(request, config.target_stages)
        return fewest_stages(request, tolerance=config.tolerance, min_stages=config.min_stages)

    def _is_wanted(self, chosen: Repacking | Refusal) -> bool:
        """A target at once, once; what was measured when it says the same twice, since there is no way back."""
        target = self.dynamic_config.repack.target_stages
        if isinstance(chosen, Refusal):
            self._wished_stages = None
            if target is not None and target < self.num_stages:
                self._warn_once(f"re-packing to repack.target_stages is not possible: {chosen.reason}", "target")
            return False
        confirmed = chosen.num_stages in (target, self._wished_stages)
        self._wished_stages = chosen.num_stages
        return confirmed

    def _choose_workers(self, decide: Decide) -> Repacking | Refusal:
        """Decide, the same on every rank; prefer to keep the stage that reads the labels."""
        rules = self._giving_back.constraints()
        topology = self.module._topo
        ranks = tuple(tuple(topology.get_axis_list(axis="pipe", idx=s)) for s in range(self.num_stages))
        config = self.dynamic_config
        request = Request(
            profile=self._planning_profile(), current=self.partition, workers=Workers(ranks, self._giving_back.nodes),
            constraints=rules, memory_cap_bytes=config.memory_cap_bytes, stage_speeds=config.stage_speeds,
            pinned=self._pinned,
        )
        chosen = decide(request)
        if isinstance(chosen, Refusal):
            return chosen
        keeping_last = decide(replace(request, constraints=_with(rules, ranks[-1])))
        if isinstance(keeping_last, Repacking) and keeping_last.num_stages == chosen.num_stages:
            chosen = keeping_last
        decided = [chosen.num_stages, *chosen.boundaries, *chosen.surviving_stages]
        same_everywhere(decided, "whom to re-pack onto", self.device)
        return chosen

    # -- doing it -----------------------------------------------------------------------------

    def _shrink(self, chosen: Repacking, plan_s: float) -> RepackEvent:
        """Go on with the chosen stages; does not return on the ranks of the others."""
        began = time.perf_counter()
        before, shrink = self.partition, Shrink(self, chosen.surviving_stages, chosen.boundaries)
        doing = "layers were moved to fewer ranks"
        with self._naming_lost_ranks(doing):
            shrink.prepare(lambda: self._check_before_shrinking(chosen))
        event = RepackEvent(
            batch=self._num_batches, before=before, after=chosen.boundaries, released_ranks=chosen.released_ranks,
            released=not shrink.stays, reason=chosen.reason, plan_s=plan_s,
            migrate_s=time.perf_counter() - began, regroup_s=0.0,
        )
        with self._no_way_back(doing):
            if not shrink.stays:
                shrink.leave(lambda: self._tell(event), self._giving_back.backend.leave)
            regrouping = time.perf_counter()
            shrink.go_on()
        with self._no_way_back(doing):  # among the ranks that stay
            self._forget_old_stages(chosen.surviving_stages)
            self._giving_back.give_back(chosen, shrink.world)
        event = replace(event, regroup_s=time.perf_counter() - regrouping)
        self.overhead.repacking_s += event.seconds
        self._tell(event)
        return event

    def _check_before_shrinking(self, chosen: Repacking) -> None:
        others = [engine for engine in _engines if engine is not self]
        if others:
            raise ValueError(
                f"{len(others)} other engine(s) of this process use the process groups that re-packing replaces; "
                "call their destroy() before"
            )
        self._giving_back.prepare(chosen)

    def _forget_old_stages(self, staying: Sequence[int]) -> None:
        """What was measured on stages, or is given for each stage, belongs to the longer pipeline."""
        config = self.dynamic_config
        per_stage = {
            key: [getattr(config, key)[stage] for stage in staying]
            for key in ("memory_cap_bytes", "stage_speeds")
            if isinstance(getattr(config, key), list)
        }
        self.dynamic_config = config.model_copy(update=per_stage)
        known = self._controller.state_dict()
        self._controller = Controller(self.dynamic_config)
        self._controller.load_state_dict(known, same_stages=False)
        self._wished_stages = None
        self._settle()

    def _tell(self, event: RepackEvent) -> None:
        for callback in self._repack_callbacks:
            try:
                callback(event)
            except Exception as error:  # noqa: BLE001 - the ranks have left: there is no way back
                warn(f"the on_repack callback {callback!r} raised {type(error).__name__}: {error}; training goes on")


def _with(rules: Constraints, ranks: Sequence[int]) -> Constraints:
    return replace(rules, ranks_stay=rules.ranks_stay | set(ranks))
