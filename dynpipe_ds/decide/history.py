"""Profiles that decisions rest on, each kept once, and what a partition would have made of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, NamedTuple

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.evidence import HISTORY, SURE, USUAL, noise_of
from dynpipe_ds.decide.speeds import Speeds
from dynpipe_ds.decide.window import Window
from dynpipe_ds.measure.profile import PipelineProfile, Smoothing, smooth
from dynpipe_ds.simulation import predicted_batches_s

_USUAL = 3  # batches whose median a change is one from

_TRIED_ON = 8  # batches at most, where layers vary

_PLANNED_FOR = 16
"""Newest batches in which a gain of planned orders is looked for: each takes two bounds."""


class Gains(NamedTuple):
    """What a partition would have saved, as shares.

    Attributes:
        by_batch: of each batch, oldest first.
        sure: if each layer had taken what it took at least in the newest two batches. Whatever holds a worker up makes
            layers slower, so what is seen here are layers that have become faster, or slower for a second time.
    """

    by_batch: list[float]
    sure: float

    @classmethod
    def of(cls, before_s: Sequence[float], after_s: Sequence[float]) -> Gains:
        """Compare seconds.

        Args:
            before_s: of each batch, and of the layers' least, on the present partition.
            after_s: on the other one.
        """
        *by_batch, sure = cls.shares(before_s, after_s)
        return cls(by_batch, sure)

    @staticmethod
    def shares(before_s: Sequence[float], after_s: Sequence[float]) -> list[float]:
        """How much less the second seconds are than the first, as shares of these."""
        return [1.0 - after / before if before else 0.0 for before, after in zip(before_s, after_s, strict=True)]


class History:
    """The newest profiles.

    Args:
        config: the section.

    Attributes:
        speeds: how fast the workers are on which layers were measured.
        has_changed: whether layers have become faster in the newest batch, beyond doubt.
        num_comparable: profiles since layers were frozen, replaced or thawed, at most so many as are remembered.
            What the others tell is of another model.
        seconds_until: of each batch, the seconds of the first 0, 1, … L layers at unit speed: a stage is one
            subtraction.
    """

    def __init__(self, config: DynamicPipelineConfig) -> None:
        self._config = config
        self.speeds = Speeds(config.stage_speeds)
        self.has_changed, self.num_comparable = False, 0
        self._window = Window(config.profile_batches)
        self._measured: deque[PipelineProfile] = deque(maxlen=HISTORY)  # of as many stages as now, backwards whole
        self._newest: deque[PipelineProfile] = deque(maxlen=config.profile_batches)
        self._profiles: deque[PipelineProfile] = deque(maxlen=HISTORY)  # at unit speed: if all are, the same objects
        self.seconds_until: deque[tuple[float, ...]] = deque(maxlen=HISTORY)
        self._num_observed, self._changes = 0, deque[int](maxlen=HISTORY)  # layers changed after so many profiles
        self._kept: dict[tuple[int, Smoothing], PipelineProfile] = {}

    def append(self, profile: PipelineProfile, whole: PipelineProfile) -> None:
        """Take in the profile of one batch.

        Args:
            profile: as measured.
            whole: the same as if all backwards had run whole.
        """
        replicas_s = [stage.replicas_busy_s for stage in whole.stages]
        has_news = self.speeds.observe(whole.batch, whole.boundaries, whole.costs("time"), replicas_s)
        at_unit_speed = self._at_unit_speed(whole)
        self._newest.append(profile)
        self._measured.append(whole)
        self._profiles.append(at_unit_speed)
        self.seconds_until.append(_seconds_until(at_unit_speed))
        if has_news:
            self._convert()
        self._kept.clear()
        self._window.observe(self.seconds_until[-1])
        self._num_observed += 1
        if not profile.batch:  # a run's first batch is slow in parts, which is no noise
            self._changes.append(self._num_observed)
        self.num_comparable = min(HISTORY, self.num_comparable + 1)
        self.has_changed = self._sees_change(profile.boundaries)

    def expect_change(self) -> None:
        """Layers take other times from now on: what was measured before tells nothing of them."""
        self.speeds.expect_change()
        self._window.restart()
        self.num_comparable = 0
        self._changes.append(self._num_observed)

    def _at_unit_speed(self, profile: PipelineProfile) -> PipelineProfile:
        speeds = self.speeds.means
        return profile if speeds is None else profile.at_unit_speed(speeds)

    def _convert(self) -> None:
        """See all that was measured anew: workers are faster or slower than was thought."""
        num_measured = min(len(self._measured), len(self._profiles))
        for i in range(1, num_measured + 1):
            self._profiles[-i] = self._at_unit_speed(self._measured[-i])
            self.seconds_until[-i] = _seconds_until(self._profiles[-i])

    @property
    def newest(self) -> list[PipelineProfile]:
        """The newest ``profile_batches`` profiles as measured, oldest first."""
        return list(self._newest)

    @property
    def is_complete(self) -> bool:
        """Whether there are as many new ones as a decision combines."""
        return len(self._newest) >= self._config.profile_batches

    def smoothed(self) -> PipelineProfile | None:
        """The newest profiles combined, backwards whole, of a worker of speed 1; ``None`` before the first batch."""
        if not self._newest:
            return None
        if self.has_changed or not self.is_complete:  # a run's first batch is slow in parts
            return self._profiles[-1]
        if self.varies:
            return self._combined(self._num_varying, "mean")
        return self._combined(len(self._newest), self._config.smoothing)

    @property
    def varies(self) -> bool:
        """Whether 'auto' plans for what many batches have in common, see :class:`Window`."""
        return self._num_varying > 0

    @property
    def _num_varying(self) -> int:
        return (self._config.rebalance_every == "auto" and not self.has_changed and self._window.many) or 0

    def varying(self) -> list[PipelineProfile]:
        """Those of them that plans are tried on, of a worker of speed 1; none where layers do not vary."""
        return self._comparable(self._num_varying)[:: max(1, self._num_varying // _TRIED_ON)] if self.varies else []

    def recent(self, count: int) -> list[PipelineProfile]:
        """So many of the newest batches at most, backwards whole, of a worker of speed 1; one at least.

        Args:
            count: of batches.
        """
        return self._comparable(count)

    def _least(self) -> PipelineProfile:
        """What layers took at least in the newest two batches: something that was odd in one of them is left out."""
        return self._combined(2, "least")

    def _comparable(self, count: int = HISTORY) -> list[PipelineProfile]:
        """So many of the newest profiles, if there were so many since layers were known to change; one at least."""
        return list(self._profiles)[-min(count, max(1, self.num_comparable)) :]

    def _combined(self, count: int, how: Smoothing) -> PipelineProfile:
        """So many of the newest profiles as one, if they can be compared; kept until another comes."""
        if (count, how) not in self._kept:
            self._kept[count, how] = smooth(self._comparable(count), how)
        return self._kept[count, how]

    def _sees_change(self, boundaries: Sequence[int]) -> bool:
        """Whether layers have become faster in the newest batch, so that stages are less alike than they were."""
        if self.num_comparable < 2:
            return False
        gains = self.gains(boundaries, None)
        more = gains.sure - median(gains.by_batch[-1 - _USUAL : -1])
        return more > max(self._config.min_gain, SURE * self.stage_noise(boundaries))

    # -- what would have been -----------------------------------------------------------------

    def gains(self, present: Sequence[int], planned: Sequence[int] | None) -> Gains:
        """What a partition would have saved of each batch's bottleneck; ``None`` stands for perfect balance.

        Of each batch since layers were known to change, as below.
        """
        num_batches = len(self._comparable())
        batches = [*list(self.seconds_until)[-num_batches:], _seconds_until(self._least())]
        before = [max(loads) for loads in self._loads(batches, present)]
        if planned is None:
            total_speed = math.fsum(self._speeds(len(present) - 1))
            after = [until[-1] / total_speed for until in batches]
        else:
            after = [max(loads) for loads in self._loads(batches, planned)]
        return Gains.of(before, after)

    def batch_gains(self, present: Sequence[int], planned: Sequence[int]) -> Gains:
        """What a partition would have saved of each batch's simulated seconds."""
        profiles = [*self._comparable(), self._least()]
        seconds = predicted_batches_s(
            [(profile, cut) for cut in (present, planned) for profile in profiles], speeds=self.speeds.values
        )
        return Gains.of(seconds[: len(profiles)], seconds[len(profiles) :])

    def ordered_gains(
        self, present: Sequence[int], planned: Sequence[int],
        least_s: Callable[[Sequence[PipelineProfile], Sequence[Sequence[int]]], list[list[float]]],
        profile: PipelineProfile, gain: float,
    ) -> Gains:
        """What a partition would have saved of each batch, in planned orders.

        To plan orders for every batch would take too long. So what changes from batch to batch is taken from the
        seconds that any order takes at least, and how much it is from the prediction.

        Args:
            present: boundaries.
            planned: other ones.
            least_s: seconds that batches take at least on each of some partitions, in any order.
            profile: that the prediction was made by.
            gain: predicted by it.
        """
        before, after = least_s([*self._comparable(_PLANNED_FOR), self._least(), profile], [present, planned])
        *by_batch, sure, predicted = Gains.shares(before, after)
        more = gain - predicted
        return Gains([each + more for each in by_batch], sure + more)

    def stage_noise(self, boundaries: Sequence[int]) -> float:
        """Noise of the noisiest stage, relative to the usual bottleneck.

        Layers on one rank slow down together, and a bottleneck is the largest of S such sums, so
        a plan's own gains can look steadier than they are. What slows down all stages alike does
        not matter: each batch counts by its stages' shares. The shares of S independent stages
        vary by sqrt(1 - 1/S) of what the stages do, which is undone here. A step where layers were
        known to change is the model's.
        """
        num_stages = len(boundaries) - 1
        history = list(self._loads(self.seconds_until, boundaries))
        if num_stages < 2 or not any(map(any, history)):
            return 0.0
        first = self._num_observed - len(history)
        changes = {known - first for known in self._changes}
        shares = [[load / (sum(loads) or 1.0) for load in loads] for loads in history]
        usual = median([max(stages) for stages in shares]) * math.sqrt(1.0 - 1.0 / num_stages)
        series = ([share / usual for share in stage] for stage in zip(*shares, strict=True))
        return max(noise_of(each, changes, usual=USUAL) for each in series)

    def _speeds(self, num_stages: int) -> Sequence[float]:
        return self.speeds.values or [1.0] * num_stages

    def _loads(self, batches: Iterable[Sequence[float]], boundaries: Sequence[int]) -> list[list[float]]:
        """Stage seconds of a partition in every batch."""
        cuts = list(zip(pairwise(boundaries), self._speeds(len(boundaries) - 1), strict=True))
        return [[(until[high] - until[low]) / speed for (low, high), speed in cuts] for until in batches]

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, each profile once."""
        same = all(a is b for a, b in zip(reversed(self._newest), reversed(self._profiles), strict=False))
        measured: dict[str, Any] = {} if same else {"newest": list(self._newest)}
        if any(a is not b for a, b in zip(reversed(self._measured), reversed(self._profiles), strict=False)):
            measured["measured"] = list(self._measured)
        return {
            "profiles": list(self._profiles), "num_newest": len(self._newest), "speeds": self.speeds.state_dict(),
            "has_changed": self.has_changed, "num_comparable": self.num_comparable,
            "window": self._window.state_dict(),
            "changed_before": [self._num_observed - known for known in self._changes],  # so many profiles ago
            **measured,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], *, same_stages: bool) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given. Older checkpoints lack ``profiles`` and have ``history`` instead, seconds of the layers,
                summed up.
            same_stages: whether it comes from as many stages; else the newest profiles are left out, while layer
                times at unit speed serve any number.
        """
        self.speeds.load_state_dict(state.get("speeds", {}) if same_stages else {})
        self.has_changed = state.get("has_changed", False)
        profiles = state["profiles"] if "profiles" in state else list(map(self._at_unit_speed, state["newest"]))
        # Older checkpoints keep no profile as it was measured where speeds are given.
        measured = state.get("measured", profiles if self._config.stage_speeds is None else [])
        self._measured = deque(measured if same_stages else [], maxlen=HISTORY)
        self._profiles = deque(profiles, maxlen=HISTORY)
        seconds_until = state["history"] if "history" in state else map(_seconds_until, profiles)
        self.seconds_until = deque(map(tuple, seconds_until), maxlen=HISTORY)
        newest = state.get("newest", profiles[len(profiles) - state.get("num_newest", 0) :])
        self._newest = deque(newest if same_stages else [], maxlen=self._config.profile_batches)
        self.num_comparable = state.get("num_comparable", len(profiles))
        changed_before = state.get("changed_before", ())
        self._num_observed, self._changes = 0, deque((-ago for ago in changed_before), maxlen=HISTORY)
        self._window.load_state_dict(state.get("window", {}))
        self._kept.clear()


def _seconds_until(profile: PipelineProfile) -> tuple[float, ...]:
    """Seconds of the first 0, 1, ... L layers."""
    return tuple(accumulate(profile.costs("time"), initial=0.0))
