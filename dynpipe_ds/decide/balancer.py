"""When is a new partition worth moving layers for, and which? A function of profiles and measured costs.

Three ways, chosen by ``rebalance_every``:

* a number N (DynMo's fixed interval; 1 is every batch): rebalance after every N batches when the
  partitioner predicts at least ``min_gain``;
* ``"auto"``: rebalance when the seconds saved over ``horizon_batches`` exceed the measured cost
  of moving, and the gain is too large and too steady to be noise;
* ``"never"``.

All of it is arithmetic on values that every rank has alike (profiles agreed by all ranks, costs
reduced over them), so every rank reaches the same decision without asking the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal

from dynpipe_ds.config import SECTION, DynamicPipelineConfig, parse_config
from dynpipe_ds.decide.costs import MoveCosts
from dynpipe_ds.decide.evidence import EVIDENCE, confirming_batches
from dynpipe_ds.decide.history import History
from dynpipe_ds.decide.judgement import Decision, Prospect, judge
from dynpipe_ds.decide.links import Links
from dynpipe_ds.decide.methods import PartitionMethod, method_at_run_time
from dynpipe_ds.decide.ordering import Ordering
from dynpipe_ds.decide.sampling import SETTLED, Sampling
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition import Plan, StageMemory

FIRST_PAUSE = 8
"""Batches without a new attempt after one that failed; doubles with each that follows."""


class Balancer:
    """Decides when to rebalance and to what; pure: it asks no rank, reads no clock and moves nothing.

    Before each batch: :meth:`wants_profile`. After each profiled one: :meth:`observe` and :meth:`decide`; after a move
    :meth:`moved`, after one that failed :meth:`failed`. Layer times are global, so nothing needs to be profiled again
    after a move before the next decision.

    Args:
        config: the ``dynamic_pipeline`` section.
        method: what chooses a partition; by default what the section names.
        pinned: cuts that no partition may have.

    Attributes:
        method: as given.
        pinned: all of them, ascending.
        ordering: in which order batches run.
    """

    def __init__(
        self, config: DynamicPipelineConfig, method: PartitionMethod | None = None, pinned: Iterable[int] = ()
    ) -> None:
        self.method = method or method_at_run_time(config, None)
        self.pinned = tuple(sorted(set(pinned)))
        self._start(config)

    @classmethod
    def from_section(cls, section: Mapping[str, Any]) -> Balancer:
        """Make the balancer of an engine, to decide without one.

        Args:
            section: the ``"dynamic_pipeline"`` section, as in the JSON.

        Returns:
            A balancer without profiles.

        Raises:
            ValueError: if it can't be used, with all problems.
        """
        return cls(parse_config({SECTION: section}))

    def _start(self, config: DynamicPipelineConfig) -> None:
        self._config = config
        self._history = History(config)
        self.ordering = Ordering(config, self._history)
        self._costs, self._links = MoveCosts(), Links()
        self._moved_bytes = 0
        self._sampling = Sampling(config.profile_every, max(SETTLED, config.profile_batches))
        self._decided_batch: int | None = None
        self._left: tuple[int, tuple[int, ...]] | None = None  # after which batch a move left which partition
        self._waits_from = 0  # the batch after which a plan was found that waits
        self._num_failures = 0
        self._paused_until = 0
        self._held_until = 0.0  # so many batches must have been trained; inf: no number will do

    # -- observing ----------------------------------------------------------------------------

    def wants_profile(self, batch: int) -> bool:
        """Tell whether to profile a batch: as :class:`Sampling` says, and all batches that an interval's end combines.

        Args:
            batch: number of the next batch, counted from 0.

        Returns:
            The same on every rank.
        """
        return self._sampling.wants(batch) or self._next_end(batch) - batch < self._config.profile_batches

    def expect_change(self, *, of_layers: bool = True) -> None:
        """Profile every batch for a while: layers take other times, or were moved.

        Args:
            of_layers: whether layers themselves have changed.
        """
        self._sampling.restart()
        if of_layers:
            self._history.expect_change()
            self.ordering.expect_change()

    def observe(self, profile: PipelineProfile, cost_s: float = 0.0) -> None:
        """Take in the profile of one batch.

        Args:
            profile: as measured, not smoothed.
            cost_s: seconds that a profile takes, with deciding, the same number on every rank.

        Raises:
            ValueError: when its number of layers is not that of earlier profiles.
        """
        newest = self.newest
        if newest and len(profile.layers) != len(newest[-1].layers):
            raise ValueError(
                f"profile of batch {profile.batch} has {len(profile.layers)} layers, the one "
                f"before {len(newest[-1].layers)}: a balancer serves one model"
            )
        profile = self._links.observe(profile)
        self._history.append(profile, self.ordering.observe(profile, cost_s))
        batch_s = max((stage.batch_s for stage in profile.stages), default=0.0)
        self._sampling.observe(
            profile.batch, self._history.seconds_until[-1],
            tolerated=self._config.min_gain / (2 * (len(profile.boundaries) - 1)),
            cost=cost_s / batch_s if batch_s else 0.0,
        )

    @property
    def speeds(self) -> list[float] | None:
        """Relative speeds of the stages' workers, as given and as measured; ``None``: all alike."""
        return self._history.speeds.values

    @property
    def unequal_workers(self) -> list[str]:
        """Which workers are slower or faster than others, a few words each."""
        return self._history.speeds.describe()

    @property
    def newest(self) -> list[PipelineProfile]:
        """The newest ``profile_batches`` profiles as measured, oldest first."""
        return self._history.newest

    @property
    def is_ready(self) -> bool:
        """Whether as many batches were profiled as a decision combines."""
        return self._history.is_complete

    def smoothed(self) -> PipelineProfile | None:
        """The newest ``profile_batches`` profiles combined, to plan with.

        Returns:
            The profile, with layer times of a worker of speed 1 and, where they are known, halves of backwards;
            ``None`` before the first batch.
        """
        profile = self._history.smoothed()
        return None if profile is None else self.ordering.fill(profile)

    # -- deciding -----------------------------------------------------------------------------

    def decide(self, batch: int, current: Sequence[int]) -> tuple[Plan, Decision] | None:
        """Make a plan and judge it, if that is due.

        Args:
            batch: number of the batch just finished and observed, counted from 0.
            current: the boundaries that it ran on.

        Returns:
            The plan and what to do with it; ``None`` if no decision is due.

        Raises:
            Exception: what the method raises, a ``ValueError`` if no partition satisfies the constraints.
        """
        if (known := self._back(batch, current) or self._again(batch, current)) is not None:
            return known
        if not self.due(batch):
            return None
        profile = self.smoothed()
        assert profile is not None, "due only when batches were profiled"
        # Planning orders has its share of the time. What it does not pay for is judged by what the cut alone changes.
        glances = self.method.seeks_best and self.ordering.is_planned() and not self.ordering.is_due()
        plan = self._cut(current, profile, heed_memory=True) if glances else self.choose(current, profile)
        decision = self.judge(plan, profile, glances=glances)
        batch_s = self._config.horizon_batches * max(profile.stage_seconds(current, speeds=self.speeds))
        least_s = self._config.min_gain * batch_s * profile.num_micro_batches
        if not decision.rebalance and not glances and decision.saved_s > max(decision.cost_s, least_s):
            self.ordering.wait(plan.boundaries)
            self._waits_from = batch
        return plan, decision

    def _again(self, batch: int, current: Sequence[int]) -> tuple[Plan, Decision] | None:
        """Judge the plan that waits by one more batch, which spares another search; a few batches long."""
        boundaries, profile = self.ordering.waiting, self.smoothed()
        if boundaries is None or profile is None:
            return None
        if batch < self._paused_until or self.is_held(batch) or set(self.pinned) & set(boundaries[1:-1]):
            self.ordering.wait_no_more()
            return None
        plan = self.plan_of(boundaries, current, profile)
        prospect = self.ordering.again(plan, profile)
        decision = None if prospect is None else self._judged(plan, profile, prospect, batch - self._waits_from)
        pays = decision is not None and decision.saved_s > decision.cost_s
        if not pays or batch >= self._waits_from + EVIDENCE or (decision is not None and decision.rebalance):
            self.ordering.wait_no_more()
        return (plan, decision) if decision is not None and pays else None

    def _back(self, batch: int, current: Sequence[int]) -> tuple[Plan, Decision] | None:
        """Back to the partition before the last move of 'auto', if the batches since have shown that it was better.

        A move that waits for certainty costs more than one that is undone, so moves are made on little evidence, and
        looked back at once.
        """
        left, profile = self._left, self.smoothed()
        if left is None or profile is None or self.is_held(batch) or batch < left[0] + EVIDENCE:
            return None
        self._left = None
        last_batch = math.inf if self._config.last_batch is None else self._config.last_batch
        if batch > last_batch or len(left[1]) != len(current) or set(self.pinned) & set(left[1][1:-1]):
            return None
        if self.ordering.is_planned():
            gains = self.ordering.gains_back(profile, EVIDENCE)
        else:
            gains = self._history.gains(current, left[1]).by_batch[-EVIDENCE:]
        if not gains:
            return None
        batch_s = max(profile.stage_seconds(current, speeds=self.speeds)) * profile.num_micro_batches
        plan = self.plan_of(left[1], current, profile)
        saved_s = self._config.horizon_batches * median(gains) * batch_s
        cost_s = self._costs.expected_s(plan.bytes_to_move) or 0.0
        if saved_s <= cost_s:
            return None
        self._decided_batch = batch
        reason = f"back: the partition before would have saved {median(gains):.1%} of the batches since"
        return plan, Decision(True, reason, saved_s, cost_s, noise=0.0)

    def due(self, batch: int) -> bool:
        """Tell whether to make a plan now.

        For 'auto' this is every batch after which a perfect balance would be worth having: a
        cheap test that spares the planning when nothing can be gained.

        Args:
            batch: number of the batch just finished and observed, counted from 0.

        Returns:
            True inside the dynamic phase, with enough batches profiled, when a decision is due.
        """
        config, every = self._config, self._config.rebalance_every
        last_batch = math.inf if config.last_batch is None else config.last_batch
        if every == "never" or not self.is_ready or not config.first_batch <= batch <= last_batch:
            return False
        if batch < self._paused_until or self.is_held(batch):
            return False
        if every == "auto":
            gains = self._history.gains(self.newest[-1].boundaries, None)
            if not confirming_batches(gains.by_batch, 0.0, config.min_gain, 1):
                return False
            # Planning orders has its share of the time; a glance at another cut takes little.
            return not self.ordering.is_planned() or self.ordering.is_due() or self.ordering.can_glance()
        return self._intervals(batch, every) > self._intervals(self._decided_batch, every)

    def choose(
        self, current: Sequence[int], profile: PipelineProfile | None = None, *, heed_memory: bool = True
    ) -> Plan:
        """The method's choice.

        Args:
            current: the present boundaries.
            profile: to choose by, at unit speed; by default :meth:`smoothed`.
            heed_memory: whether ``memory_cap_bytes`` counts.

        Returns:
            The plan.

        Raises:
            ValueError: if no partition satisfies the constraints.
            RuntimeError: if no batch was profiled yet.
        """
        profile = profile or self.smoothed()
        if profile is None:
            raise RuntimeError("there is no profile to rebalance from; train one batch first")
        plan = self._cut(current, profile, heed_memory=heed_memory)
        if not (self.method.seeks_best and heed_memory and self.ordering.is_planned()):
            return plan
        best = self.ordering.together(profile, [current, plan.boundaries], self.pinned)
        return self.method.replan(plan, best.boundaries, profile, current=current, speeds=self.speeds)

    def _cut(self, current: Sequence[int], profile: PipelineProfile, *, heed_memory: bool) -> Plan:
        """The method's choice, whatever the order."""
        config, memory = self._config, None
        if config.memory_cap_bytes is not None and heed_memory:
            memory = StageMemory(
                state_bytes=profile.state_bytes(), activation_bytes=profile.activation_bytes(),
                num_micro_batches=profile.num_micro_batches, cap_bytes=config.memory_cap_bytes,
            )
        return self.method.plan(
            profile, len(current) - 1, current=current, pinned=self.pinned, memory=memory,
            speeds=self.speeds, allow_empty=config.allow_empty_stages,
        )

    @staticmethod
    def plan_of(boundaries: tuple[int, ...], current: Sequence[int], profile: PipelineProfile | None) -> Plan:
        """What boundaries that the user has chosen promise.

        Args:
            boundaries: checked.
            current: the present ones.
            profile: to judge by; ``None`` if nothing was profiled yet.

        Returns:
            The plan.
        """
        if profile is None:
            return Plan(boundaries, bottleneck=0.0)
        method = PartitionMethod(boundaries=boundaries)
        return method.plan(profile, len(boundaries) - 1, current=current, allow_empty=True)

    def judge(self, plan: Plan, profile: PipelineProfile | None = None, *, glances: bool = False) -> Decision:
        """Decide on a plan; an interval of N batches begins anew.

        Args:
            plan: the partitioner's choice.
            profile: the profile that it chose by; its boundaries are the present partition. By default
                :meth:`smoothed`.
            glances: whether to plan no order for it.

        Returns:
            The decision.
        """
        profile = profile or self.smoothed()
        assert profile is not None, "asked after a batch was profiled"
        self._decided_batch = profile.batch
        # An interval takes the partitioner's own prediction, in its own cost, unless that is the seconds of a batch.
        judges_seconds = self.method.seeks_best or self._config.rebalance_every == "auto"
        prospect: Prospect | None = None
        if judges_seconds:
            prospect = (self.ordering.glance if glances else self.ordering.prospect)(plan, profile)
        return self._judged(plan, profile, prospect)

    def _judged(
        self, plan: Plan, profile: PipelineProfile, prospect: Prospect | None, num_unseen: int = 0
    ) -> Decision:
        cost_s = self._costs.expected_s(plan.bytes_to_move)
        decision = judge(plan, profile, self._history, self._config, cost_s, prospect, num_unseen)
        if decision.rebalance and self._config.rebalance_every == "auto":
            self._left = profile.batch, profile.boundaries
            self.ordering.leave(profile.boundaries)
        return decision

    def _next_end(self, batch: int) -> float:
        """The next batch, from this one on, after which an interval of N ends that is decided on; inf: none."""
        every = self._config.rebalance_every
        if not isinstance(every, int):
            return math.inf
        first, last = self._config.first_batch, self._config.last_batch
        num_intervals = self._intervals(self._decided_batch, every) + 1
        end = max(batch, first + num_intervals * every - 1, self._paused_until, self._held_until - 1)
        return end if last is None or end <= last else math.inf

    def _intervals(self, batch: int | None, every: int) -> int:
        """Number of whole intervals of the dynamic phase that have ended with this batch."""
        return 0 if batch is None else max(0, batch + 1 - self._config.first_batch) // every

    # -- what became of it --------------------------------------------------------------------

    def moved(self, batch: int, num_bytes: int = 0) -> None:
        """Begin a new interval of N batches, also after a move that the user asked for.

        Args:
            batch: number of the batch just finished, counted from 0.
            num_bytes: that were planned to move; 0 when unknown.
        """
        self._moved_bytes = num_bytes
        self._decided_batch = batch
        self._num_failures = 0
        self.ordering.wait_no_more()
        self.expect_change(of_layers=False)

    def record_cost(self, seconds: float) -> None:
        """Take in what the last move cost, as soon as all ranks know it.

        Args:
            seconds: planning and migration, the same number on every rank (the slowest one's).

        Raises:
            ValueError: for a negative or non-finite cost.
        """
        self._costs.record(self._moved_bytes, seconds)

    def failed(self, batch: int) -> None:
        """Pause after a rebalance that failed, longer each time: what is missing may stay so.

        Args:
            batch: number of the batch just finished, counted from 0.
        """
        self._decided_batch, self._left = batch, None
        self._paused_until = batch + FIRST_PAUSE * 2 ** min(self._num_failures, 6)
        self._num_failures += 1
        self.ordering.failed(self._paused_until)

    def hold(self, batch: int, num_batches: int | Literal["forever"]) -> None:
        """Decide nothing for some batches: the user has chosen the partition.

        Args:
            batch: number of the next batch, counted from 0.
            num_batches: how many batches, from this one on, run on it; ``"forever"`` until :meth:`release`.
        """
        self._left = None
        self._held_until = math.inf if num_batches == "forever" else batch + num_batches

    def release(self) -> None:
        """Decide again, and look back at no move that the user has followed up."""
        self._held_until, self._left = 0.0, None

    def is_held(self, batch: int) -> bool:
        """Tell whether the partition is the user's to change after a batch.

        Args:
            batch: number of the batch just finished, counted from 0.

        Returns:
            True until the hold has ended.
        """
        return batch + 1 < self._held_until

    def forbid(self, cuts: Iterable[int]) -> None:
        """Choose no partition with these cuts any more.

        Args:
            cuts: positions; those forbidden before stay so.
        """
        self.pinned = tuple(sorted({*self.pinned, *cuts}))

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that its decisions rest on: profiles (values, each once) and plain values."""
        return {
            **self._history.state_dict(),
            "costs_s": self._costs.state_dict(),
            "moved_bytes": self._moved_bytes,
            "links": self._links.state_dict(),
            "decided_batch": self._decided_batch,
            "left": self._left,
            "waits_from": self._waits_from,
            "num_failures": self._num_failures,
            "paused_until": self._paused_until,
            "held_until": self._held_until,
            "sampling": self._sampling.state_dict(),
            "ordering": self.ordering.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, same_stages: bool = True) -> None:
        """Take in what :meth:`state_dict` gave; its next decision is the one that the other would have made.

        Args:
            state: as given. Older checkpoints keep profiles otherwise (:class:`History`), and they lack failures,
                holds and ``sampling``.
            same_stages: whether it comes from as many stages; the newest profiles, the costs of moving, the pause
                after a failure and a hold are left out otherwise, while layer times serve any number.
        """
        self._history.load_state_dict(state, same_stages=same_stages)
        self._decided_batch = state["decided_batch"]
        kept = state if same_stages else {}
        self._costs.load_state_dict(kept.get("costs_s", []))
        self._moved_bytes = kept.get("moved_bytes", 0)
        self._links.load_state_dict(kept.get("links", {}))
        left = kept.get("left")
        self._left = None if left is None else (left[0], tuple(left[1]))
        self._waits_from = kept.get("waits_from", 0)
        self._num_failures = kept.get("num_failures", 0)
        self._paused_until = kept.get("paused_until", 0)
        self._held_until = kept.get("held_until", 0.0)
        self.ordering.load_state_dict(state.get("ordering", {}), same_stages=same_stages)
        self._sampling.restart()
        if "sampling" in kept:
            self._sampling.load_state_dict(kept["sampling"])

    def serve(self, config: DynamicPipelineConfig) -> None:
        """Go on with another number of stages.

        Args:
            config: the section, with what is given for each stage.
        """
        known = self.state_dict()
        self._start(config)
        self.load_state_dict(known, same_stages=False)
