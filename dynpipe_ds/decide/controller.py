"""When is a new partition worth moving layers for? A function of profiles and measured costs.

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
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from statistics import median, median_low
from typing import TYPE_CHECKING, Any, Literal

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.evidence import HISTORY, LEAST_EVIDENCE, confirming_batches, evidence_for, noise_of
from dynpipe_ds.decide.sampling import SETTLED, Sampling
from dynpipe_ds.measure.profile import PipelineProfile, smooth
from dynpipe_ds.simulation import predicted_batches_s

if TYPE_CHECKING:
    from dynpipe_ds.partition import Plan

FIRST_PAUSE = 8
"""Batches without a new attempt after one that failed; doubles with each that follows."""

REMEMBERED_COSTS = 5
"""Newest measured costs of moving that the expected cost is taken from."""

FIRST_COST = 0.1
"""What the first move is expected to cost, in batches: most take 0.02 to 0.1, the slowest of 289 took 0.25.

Nothing is known of a move before there was one, and one that is put off for ever teaches nothing.
"""

ROUNDING = 1e-9
"""Batches whose predicted seconds differ by a smaller share take equally long: sums round."""


@dataclass(frozen=True)
class Decision:
    """Whether to move, and why; all numbers are zero where the plan is the present partition.

    Args:
        rebalance: move to the planned partition now.
        reason: one short sentence for a person.
        saved_s: predicted seconds saved over the next N batches, or over ``horizon_batches``
            for 'auto'; negative when the plan is slower.
        cost_s: expected seconds for moving.
        noise: standard deviation of one batch's relative gain.
    """

    rebalance: bool
    reason: str
    saved_s: float
    cost_s: float
    noise: float


class Controller:
    """Decides when to rebalance; holds the recent profiles and costs, nothing else.

    Before each batch the engine asks :meth:`wants_profile`. After each profiled one it calls :meth:`observe`, asks
    :meth:`due`, and if so makes a plan and asks :meth:`worth_it`; after a move it calls :meth:`record_cost` and
    :meth:`record_rebalance`. Layer times are global, so nothing needs to be profiled again after a move before the
    next decision.

    Args:
        config: the ``dynamic_pipeline`` section.
    """

    def __init__(self, config: DynamicPipelineConfig) -> None:
        self._config = config
        self._newest: deque[PipelineProfile] = deque(maxlen=config.profile_batches)
        # Seconds of the first 0, 1, ... L layers, batch by batch: a stage is one subtraction.
        self._history: deque[tuple[float, ...]] = deque(maxlen=HISTORY)
        self._profiles: deque[PipelineProfile] = deque(maxlen=HISTORY)  # at unit speed
        self._costs_s: deque[float] = deque(maxlen=REMEMBERED_COSTS)
        self._sampling = Sampling(config.profile_every, max(SETTLED, config.profile_batches))
        self._decided_batch: int | None = None
        self._num_failures = 0
        self._paused_until = 0
        self._held_until = 0.0  # so many batches must have been trained; inf: no number will do

    def wants_profile(self, batch: int) -> bool:
        """Tell whether to profile a batch: as :class:`Sampling` says, and all batches that an interval's end combines.

        Args:
            batch: number of the next batch, counted from 0.
        """
        return self._sampling.wants(batch) or self._next_end(batch) - batch < self._config.profile_batches

    def expect_change(self) -> None:
        """Profile every batch for a while: layers were frozen, replaced or moved."""
        self._sampling.restart()

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
        ready = len(self._newest) >= config.profile_batches
        if every == "never" or not ready or not config.first_batch <= batch <= last_batch:
            return False
        if batch < self._paused_until or self.is_held(batch):
            return False
        if every == "auto":
            gains = self._gains(self._newest[-1].boundaries, None)
            return confirming_batches(gains, 0.0, config.min_gain, LEAST_EVIDENCE) > 0
        return self._intervals(batch, every) > self._intervals(self._decided_batch, every)

    def observe(self, profile: PipelineProfile, cost_s: float = 0.0) -> None:
        """Take in the profile of one batch.

        Args:
            profile: as measured, not smoothed.
            cost_s: seconds that a profile takes, with deciding, the same number on every rank.

        Raises:
            ValueError: when its number of layers is not that of earlier profiles.
        """
        if self._newest and len(profile.layers) != len(self._newest[-1].layers):
            raise ValueError(
                f"profile of batch {profile.batch} has {len(profile.layers)} layers, the one "
                f"before {len(self._newest[-1].layers)}: a controller serves one model"
            )
        speeds = self._config.stage_speeds
        at_unit_speed = profile if speeds is None else profile.at_unit_speed(speeds)
        self._newest.append(profile)
        self._profiles.append(at_unit_speed)
        self._history.append(_seconds_until(at_unit_speed))
        batch_s = max((stage.batch_s for stage in profile.stages), default=0.0)
        self._sampling.observe(
            profile.batch, self._history[-1], tolerated=self._config.min_gain / (2 * (len(profile.boundaries) - 1)),
            cost=cost_s / batch_s if batch_s else 0.0,
        )

    def smoothed(self) -> PipelineProfile | None:
        """The newest ``profile_batches`` profiles combined, to plan with.

        Returns:
            The profile, with layer times of a worker of speed 1; ``None`` before the first batch.
        """
        if not self._newest:
            return None
        return smooth(self._newest, self._config.smoothing, speeds=self._config.stage_speeds)

    def worth_it(self, plan: Plan, profile: PipelineProfile) -> Decision:
        """Decide on a plan; an interval of N batches begins anew.

        Args:
            plan: the partitioner's choice.
            profile: the profile that it chose by, of :meth:`smoothed`; its boundaries are the
                present partition.

        Returns:
            The decision.
        """
        config, every = self._config, self._config.rebalance_every
        self._decided_batch = profile.batch
        if tuple(plan.boundaries) == profile.boundaries:
            return Decision(False, "the present partition is the best one known", saved_s=0.0, cost_s=0.0, noise=0.0)
        batch_s, planned_s = predicted_batches_s(
            [(profile, profile.boundaries), (profile, plan.boundaries)], speeds=config.stage_speeds
        )
        num_batches = every if isinstance(every, int) else config.horizon_batches
        saved_s = num_batches * (batch_s - planned_s)
        if abs(batch_s - planned_s) <= ROUNDING * batch_s:
            saved_s = 0.0
        cost_s = self._expected_cost_s(batch_s)
        # A plan that keeps the bottleneck can still shorten the batch, by how it fills and drains.
        refines = plan.predicted_gain <= 0 < saved_s
        gain = 1.0 - planned_s / batch_s if refines else plan.predicted_gain
        gains_of = self._batch_gains if refines else self._gains
        gains = gains_of(profile.boundaries, plan.boundaries)
        noise = max(noise_of(gains), self._stage_noise(profile.boundaries))
        if every == "never":
            rebalance, reason = False, "rebalance_every is 'never'"
        elif every == "auto":
            rebalance, reason = self._judge(gains, noise, saved_s, cost_s)
        else:
            rebalance = gain > 0 and gain >= config.min_gain
            reason = (
                f"predicted gain {gain:.1%} "
                f"{'reaches' if rebalance else 'is less than'} min_gain {config.min_gain:.1%}"
            )
        return Decision(rebalance, reason, saved_s, cost_s, noise)

    def record_cost(self, seconds: float, bytes_moved: int) -> None:
        """Take in what a move cost.

        Args:
            seconds: planning and migration, the same number on every rank (the slowest one's).
            bytes_moved: what travelled. Not used yet: successive moves are of a size.

        Raises:
            ValueError: for a negative or non-finite cost.
        """
        if not 0 <= seconds < math.inf or bytes_moved < 0:
            raise ValueError(
                f"seconds = {seconds}, bytes_moved = {bytes_moved}: must be finite and >= 0"
            )
        self._costs_s.append(seconds)

    def record_rebalance(self, batch: int) -> None:
        """Begin a new interval of N batches, also after a move that the user asked for.

        Args:
            batch: number of the batch just finished, counted from 0.
        """
        self._decided_batch = batch
        self._num_failures = 0
        self.expect_change()

    def record_failure(self, batch: int) -> None:
        """Pause after a rebalance that failed, longer each time: what is missing may stay so.

        Args:
            batch: number of the batch just finished, counted from 0.
        """
        self._decided_batch = batch
        self._paused_until = batch + FIRST_PAUSE * 2 ** min(self._num_failures, 6)
        self._num_failures += 1

    def hold(self, batch: int, num_batches: int | Literal["forever"]) -> None:
        """Decide nothing for some batches: the user has chosen the partition.

        Args:
            batch: number of the next batch, counted from 0.
            num_batches: how many batches, from this one on, run on it; ``"forever"`` until :meth:`release`.
        """
        self._held_until = math.inf if num_batches == "forever" else batch + num_batches

    def release(self) -> None:
        """Decide again."""
        self._held_until = 0.0

    def is_held(self, batch: int) -> bool:
        """Tell whether the partition is the user's to change after a batch.

        Args:
            batch: number of the batch just finished, counted from 0.
        """
        return batch + 1 < self._held_until

    @property
    def newest(self) -> list[PipelineProfile]:
        """The newest ``profile_batches`` profiles as measured, oldest first."""
        return list(self._newest)

    def state_dict(self) -> dict[str, Any]:
        """All that its decisions rest on: profiles (values, each once) and plain values."""
        measured = {} if self._config.stage_speeds is None else {"newest": list(self._newest)}
        return {
            "profiles": list(self._profiles),
            "num_newest": len(self._newest),
            **measured,
            "costs_s": list(self._costs_s),
            "decided_batch": self._decided_batch,
            "num_failures": self._num_failures,
            "paused_until": self._paused_until,
            "held_until": self._held_until,
            "sampling": self._sampling.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, same_stages: bool = True) -> None:
        """Take in what :meth:`state_dict` gave; its next decision is the one that the other would have made.

        Args:
            state: as given. Older checkpoints lack ``profiles`` and have ``history`` instead (seconds of the layers,
                summed up), and they lack failures, holds and ``sampling``.
            same_stages: whether it comes from as many stages; the newest profiles, the costs of moving, the pause
                after a failure and a hold are left out otherwise, while layer times serve any number.
        """
        profiles = state.get("profiles", [])
        self._profiles = deque(profiles, maxlen=HISTORY)
        history = state["history"] if "history" in state else map(_seconds_until, profiles)
        self._history = deque(map(tuple, history), maxlen=HISTORY)
        newest = state.get("newest", profiles[len(profiles) - state.get("num_newest", 0) :])
        self._newest = deque(newest if same_stages else [], maxlen=self._config.profile_batches)
        self._costs_s = deque(state["costs_s"] if same_stages else [], maxlen=REMEMBERED_COSTS)
        self._decided_batch = state["decided_batch"]
        self._num_failures = state.get("num_failures", 0) if same_stages else 0
        self._paused_until = state.get("paused_until", 0) if same_stages else 0
        self._held_until = state.get("held_until", 0.0) if same_stages else 0.0
        self._sampling.restart()
        if same_stages and "sampling" in state:
            self._sampling.load_state_dict(state["sampling"])

    def _judge(
        self, gains: Sequence[float], noise: float, saved_s: float, cost_s: float
    ) -> tuple[bool, str]:
        """The rule of 'auto': the move pays for itself and the gain is real."""
        money = (
            f"{saved_s:.3g} s saved over {self._config.horizon_batches} batches, "
            f"{cost_s:.3g} s to move"
        )
        if saved_s <= cost_s or saved_s <= 0:
            return False, f"does not pay: {money}"
        evidence = evidence_for(saved_s / self._config.horizon_batches, cost_s)
        num_batches = confirming_batches(gains, noise, self._config.min_gain, evidence)
        if not num_batches:
            seen = median(gains[-evidence:]) if gains else 0.0
            return False, f"gain {seen:.1%} not yet beyond min_gain and the noise of {noise:.1%}"
        return True, f"pays: {money}; gain confirmed by {num_batches} batches"

    def _expected_cost_s(self, batch_s: float) -> float:
        """The usual cost of the newest moves; before the first, :data:`FIRST_COST` of a batch.

        The low median keeps a slow first move (memory pools, connections) from blocking others.
        """
        return median_low(self._costs_s) if self._costs_s else FIRST_COST * batch_s

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

    def _speeds(self, num_stages: int) -> Sequence[float]:
        return self._config.stage_speeds or [1.0] * num_stages

    def _loads(self, boundaries: Sequence[int]) -> list[list[float]]:
        """Stage seconds of a partition in every batch of the history."""
        cuts = list(zip(pairwise(boundaries), self._speeds(len(boundaries) - 1), strict=True))
        return [
            [(until[high] - until[low]) / speed for (low, high), speed in cuts]
            for until in self._history
        ]

    def _gains(self, present: Sequence[int], planned: Sequence[int] | None) -> list[float]:
        """What a plan would have saved of each batch's bottleneck; ``None``: perfect balance."""
        before = [max(loads) for loads in self._loads(present)]
        if planned is None:
            total_speed = math.fsum(self._speeds(len(present) - 1))
            after = [until[-1] / total_speed for until in self._history]
        else:
            after = [max(loads) for loads in self._loads(planned)]
        return [1.0 - a / b if b else 0.0 for a, b in zip(after, before, strict=True)]

    def _batch_gains(self, present: Sequence[int], planned: Sequence[int]) -> list[float]:
        """What a plan would have saved of each batch's simulated seconds."""
        seconds = predicted_batches_s(
            [(profile, cut) for cut in (present, planned) for profile in self._profiles],
            speeds=self._config.stage_speeds,
        )
        before, after = seconds[: len(self._profiles)], seconds[len(self._profiles) :]
        return [1.0 - a / b if b else 0.0 for a, b in zip(after, before, strict=True)]

    def _stage_noise(self, boundaries: Sequence[int]) -> float:
        """Noise of the noisiest stage, relative to the usual bottleneck.

        Layers on one rank slow down together, and a bottleneck is the largest of S such sums, so
        a plan's own gains can look steadier than they are. What slows down all stages alike does
        not matter: each batch counts by its stages' shares. The shares of S independent stages
        vary by sqrt(1 - 1/S) of what the stages do, which is undone here.
        """
        num_stages = len(boundaries) - 1
        history = [loads for loads in self._loads(boundaries) if any(loads)]
        if num_stages < 2 or not history:
            return 0.0
        shares = [[load / sum(loads) for load in loads] for loads in history]
        noise = max(map(noise_of, zip(*shares, strict=True)))
        usual = median([max(stages) for stages in shares])
        return noise / usual / math.sqrt(1.0 - 1.0 / num_stages)


def _seconds_until(profile: PipelineProfile) -> tuple[float, ...]:
    """Seconds of the first 0, 1, ... L layers."""
    return tuple(accumulate(profile.costs("time"), initial=0.0))
