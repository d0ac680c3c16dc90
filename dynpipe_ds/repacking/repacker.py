"""Training on fewer ranks: decide, shrink, renew what is counted by stage."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dynpipe_ds.events import RepackEvent
from dynpipe_ds.ranks.agreement import same_everywhere
from dynpipe_ds.release import ReleaseError
from dynpipe_ds.repacking.decision import Refusal, Repacking, fewest_stages, first_fit, to_stages
from dynpipe_ds.repacking.giving_back import GivingBack
from dynpipe_ds.repacking.live import RepackError, Shrink
from dynpipe_ds.repacking.request import Request
from dynpipe_ds.repacking.survivors import Workers
from dynpipe_ds.telling import tell_all

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

_SHARE_FOR_PLANNING = 0.01
"""Deciding may cost this share of run: where it takes long, it is done less often."""

Decide = Callable[[Request], Repacking | Refusal]

_runs: weakref.WeakSet[Run] = weakref.WeakSet()


class Repacker:
    """Lets a pipeline get shorter while it trains; deciding and doing is collective over all ranks.

    Attributes:
        giving_back: gives the freed workers back.
        callbacks: called after re-packing, also on the ranks that leave.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stage = run.stage
        self.callbacks: list[Callable[[RepackEvent], Any]] = []
        self._wished_stages: int | None = None
        self._next_batch = run.config.repack.earliest_batch

    def start(self) -> None:
        """Begin, after DeepSpeed's constructor.

        Raises:
            ValueError: on every rank, if the release back-end can't work on some rank.
        """
        self.giving_back = GivingBack(self._run.config.repack.release, self._stage.device)
        _runs.add(self._run)

    def end(self) -> None:
        """The process groups are the engine's no more."""
        _runs.discard(self._run)

    def wants_profile(self, batch: int) -> bool:
        """Tell whether to profile a batch, the same on every rank: a shrink is confirmed by new profiles only."""
        balancer, window = self._run.balancer, self._run.config.profile_batches
        confirms = self._wished_stages is not None and self._next_batch - batch < window
        return confirms and not balancer.is_held(batch)

    def repack(self, num_stages: int) -> RepackEvent:
        """Go on with fewer stages, whatever throughput that costs; does not return on ranks that are not needed.

        Args:
            num_stages: n, at least 1 and fewer than now.

        Raises:
            RuntimeError: if no batch was profiled yet.
            RepackError: on every rank, if it can't be done or failed; training can go on with all ranks.
        """
        if not self._run.balancer.newest:
            raise RuntimeError("there is no profile to re-pack by; train one batch first")
        with self._run.clock.work("decide") as deciding:
            chosen = self._choose_workers(lambda request: to_stages(request, num_stages))
        if isinstance(chosen, Refusal):
            raise RepackError(f"re-packing to {num_stages} stages is not possible: {chosen.reason}")
        return self._shrink(chosen, deciding.seconds)

    # -- deciding -----------------------------------------------------------------------------

    def repack_if_wanted(self) -> None:
        """Shrink if the configuration asks for it; a failure leaves training going on with all ranks."""
        run = self._run
        config, balancer, batch = run.config.repack, run.balancer, run.num_batches - 1
        if not config.enabled or not balancer.is_ready or self._stage.num_stages == 1 or batch < self._next_batch:
            return
        if balancer.is_held(batch):
            return
        try:
            with run.clock.work("decide") as deciding:
                chosen = self._choose_workers(self._decide)
            plan_s = self._agreed_cost(deciding.seconds)
            wanted = self._is_wanted(chosen)
            self._next_batch = batch + self._batches_until_next_decision(plan_s)
            if wanted:
                assert isinstance(chosen, Repacking)
                self._shrink(chosen, plan_s)
            else:
                run.overhead.planning_s += plan_s
        except (RepackError, ReleaseError) as error:  # raised only before the point of no return
            self._next_batch = 2 * batch + 8
            run.warn_once(f"re-packing after batch {run.num_batches} failed ({error})", "repack")

    def _agreed_cost(self, seconds: float) -> float:
        cost = torch.tensor([seconds], dtype=torch.float64, device=self._stage.device)
        dist.all_reduce(cost, op=dist.ReduceOp.MAX)
        return float(cost.item())

    def _batches_until_next_decision(self, plan_s: float) -> int:
        """Soon, if only the confirmation is missing; else as deciding can be afforded."""
        newest = self._run.balancer.newest[-1]
        batch_s = max((stage.batch_s for stage in newest.stages), default=0.0) or plan_s
        affordable = 0 if self._wished_stages is not None else math.ceil(plan_s / (_SHARE_FOR_PLANNING * batch_s))
        return max(self._run.config.profile_batches, affordable)

    def _decide(self, request: Request) -> Repacking | Refusal:
        config = self._run.config.repack
        if config.method == "first_fit":
            return first_fit(request, target_stages=config.target_stages, min_stages=config.min_stages)
        if config.target_stages is not None:
            return to_stages(request, config.target_stages)
        return fewest_stages(request, tolerance=config.tolerance, min_stages=config.min_stages)

    def _is_wanted(self, chosen: Repacking | Refusal) -> bool:
        """A target at once, once; what was measured when it says the same twice, since there is no way back."""
        target = self._run.config.repack.target_stages
        if isinstance(chosen, Refusal):
            self._wished_stages = None
            if target is not None and target < self._stage.num_stages:
                self._run.warn_once(
                    f"re-packing to repack.target_stages is not possible: {chosen.reason}", "target"
                )
            return False
        confirmed = chosen.num_stages in (target, self._wished_stages)
        self._wished_stages = chosen.num_stages
        return confirmed

    def _choose_workers(self, decide: Decide) -> Repacking | Refusal:
        """Decide, the same on every rank; prefer to keep the stage that reads the labels."""
        rules, stage, run = self.giving_back.constraints(), self._stage, self._run
        ranks = tuple(stage.pipeline.ranks_of(s) for s in range(stage.num_stages))
        profile = run.balancer.smoothed()
        assert profile is not None, "asked after a batch was profiled"
        request = Request(
            profile=profile, current=stage.partition, workers=Workers(ranks, self.giving_back.nodes),
            constraints=rules, memory_cap_bytes=run.config.memory_cap_bytes,
            stage_speeds=run.balancer.speeds, pinned=run.balancer.pinned,
        )
        chosen = decide(request)
        if isinstance(chosen, Refusal):
            return chosen
        with_last = replace(rules, ranks_stay=rules.ranks_stay | set(ranks[-1]))
        keeping_last = decide(replace(request, constraints=with_last))
        if isinstance(keeping_last, Repacking) and keeping_last.num_stages == chosen.num_stages:
            chosen = keeping_last
        decided = [chosen.num_stages, *chosen.boundaries, *chosen.surviving_stages]
        same_everywhere(decided, "whom to re-pack onto", stage.device)
        return chosen

    # -- doing it -----------------------------------------------------------------------------

    def _shrink(self, chosen: Repacking, plan_s: float) -> RepackEvent:
        """Go on with the chosen stages; does not return on the ranks of the others."""
        guard, clock, before = self._stage.guard, self._run.clock, self._stage.partition
        shrink = Shrink(self._stage, self._run.move_layers, chosen.surviving_stages, chosen.boundaries)
        doing = "layers were moved to fewer ranks"
        with guard.naming_lost_ranks(doing), clock.work("move") as moving:
            moving.num_bytes = shrink.prepare(lambda: self._check_before_shrinking(chosen))
        event = RepackEvent(
            batch=self._run.num_batches, before=before, after=chosen.boundaries,
            released_ranks=chosen.released_ranks, released=not shrink.stays, reason=chosen.reason, plan_s=plan_s,
            migrate_s=moving.seconds, regroup_s=0.0,
        )
        with guard.no_way_back(doing):
            if not shrink.stays:
                shrink.leave(lambda: tell_all(self.callbacks, event, "on_repack"), self.giving_back.backend.leave)
            regrouping_s = clock.now_s()
            with clock.work("regroup"):
                shrink.go_on()
        with guard.no_way_back(doing):  # among the ranks that stay
            self._forget_old_stages(chosen.surviving_stages)
            self.giving_back.give_back(chosen, shrink.world)
        event = replace(event, regroup_s=clock.now_s() - regrouping_s)
        self._run.overhead.repacking_s += event.seconds
        self._run.journal.repacked(event)
        tell_all(self.callbacks, event, "on_repack")
        return event

    def _check_before_shrinking(self, chosen: Repacking) -> None:
        others = [run for run in _runs if run is not self._run]
        if others:
            raise ValueError(
                f"{len(others)} other engine(s) of this process use the process groups that re-packing replaces; "
                "call their destroy() before"
            )
        self.giving_back.prepare(chosen)

    def _forget_old_stages(self, staying: Sequence[int]) -> None:
        """What was measured on stages, or is given for each stage, belongs to the longer pipeline."""
        run, config = self._run, self._run.config
        given = {"memory_cap_bytes": config.memory_cap_bytes, "stage_speeds": run.balancer.speeds}
        per_stage = {
            key: [values[stage] for stage in staying] for key, values in given.items() if isinstance(values, list)
        }
        run.config = config.model_copy(update=per_stage)
        run.balancer.serve(run.config)
        self._wished_stages = None
        self._stage.settle()
        run.profiler.sizes_changed()

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that its decisions rest on besides profiles, as plain values."""
        return {"wished_stages": self._wished_stages, "next_batch": self._next_batch}

    def load_state_dict(self, state: Mapping[str, Any], *, same_stages: bool) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; older checkpoints have none of it.
            same_stages: whether it comes from as many stages.
        """
        self._wished_stages = state.get("wished_stages") if same_stages else None
        self._next_batch = max(state.get("next_batch", 0), self._run.config.repack.earliest_batch)
