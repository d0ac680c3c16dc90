"""Profiles that decisions rest on, each kept once, and what a partition would have made of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import median
from typing import Any

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.evidence import HISTORY, noise_of
from dynpipe_ds.decide.speeds import Speeds
from dynpipe_ds.measure.profile import PipelineProfile, smooth
from dynpipe_ds.planning import least_seconds
from dynpipe_ds.simulation import Workload, predicted_batches_s

_PLANNED_FOR = 16
"""Newest batches in which a gain of planned orders is looked for: each takes two bounds."""


class History:
    """The newest profiles.

    Args:
        config: the section.

    Attributes:
        speeds: how fast the workers are on which layers were measured.
        seconds_until: of each batch, the seconds of the first 0, 1, … L layers at unit speed: a stage is one
            subtraction.
    """

    def __init__(self, config: DynamicPipelineConfig) -> None:
        self._config = config
        self.speeds = Speeds(config.stage_speeds)
        self._measured: deque[PipelineProfile] = deque(maxlen=HISTORY)  # of as many stages as now, backwards whole
        self._newest: deque[PipelineProfile] = deque(maxlen=config.profile_batches)
        self._profiles: deque[PipelineProfile] = deque(maxlen=HISTORY)  # at unit speed: if all are, the same objects
        self.seconds_until: deque[tuple[float, ...]] = deque(maxlen=HISTORY)

    def append(self, profile: PipelineProfile, whole: PipelineProfile) -> None:
        """Take in the profile of one batch.

        Args:
            profile: as measured.
            whole: the same as if all backwards had run whole.
        """
        has_news = self.speeds.observe(whole.batch, whole.boundaries, whole.costs("time"))
        at_unit_speed = self._at_unit_speed(whole)
        self._newest.append(profile)
        self._measured.append(whole)
        self._profiles.append(at_unit_speed)
        self.seconds_until.append(_seconds_until(at_unit_speed))
        if has_news:
            self._convert()

    def _at_unit_speed(self, profile: PipelineProfile) -> PipelineProfile:
        speeds = self.speeds.values
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
        return smooth(list(self._profiles)[-len(self._newest) :], self._config.smoothing)

    # -- what would have been -----------------------------------------------------------------

    def gains(self, present: Sequence[int], planned: Sequence[int] | None) -> list[float]:
        """What a partition would have saved of each batch's bottleneck; ``None`` stands for perfect balance."""
        before = [max(loads) for loads in self._loads(present)]
        if planned is None:
            total_speed = math.fsum(self._speeds(len(present) - 1))
            after = [until[-1] / total_speed for until in self.seconds_until]
        else:
            after = [max(loads) for loads in self._loads(planned)]
        return [1.0 - a / b if b else 0.0 for a, b in zip(after, before, strict=True)]

    def batch_gains(self, present: Sequence[int], planned: Sequence[int]) -> list[float]:
        """What a partition would have saved of each batch's simulated seconds."""
        seconds = predicted_batches_s(
            [(profile, cut) for cut in (present, planned) for profile in self._profiles],
            speeds=self.speeds.values,
        )
        before, after = seconds[: len(self._profiles)], seconds[len(self._profiles) :]
        return [1.0 - a / b if b else 0.0 for a, b in zip(after, before, strict=True)]

    def least_gains(
        self, present: Sequence[int], planned: Sequence[int], fill: Callable[[PipelineProfile], PipelineProfile]
    ) -> list[float]:
        """What a partition would have saved of the seconds that a batch takes at least, in whatever order.

        Args:
            present: boundaries.
            planned: other ones.
            fill: adds halves of backwards to a profile of whole ones.
        """
        newest = [fill(profile) for profile in list(self._profiles)[-_PLANNED_FOR:]]
        before, after = (
            [least_seconds(Workload.from_profile(p, cut, speeds=self.speeds.values)) for p in newest]
            for cut in (present, planned)
        )
        return [1.0 - a / b if b else 0.0 for a, b in zip(after, before, strict=True)]

    def stage_noise(self, boundaries: Sequence[int]) -> float:
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

    def _speeds(self, num_stages: int) -> Sequence[float]:
        return self.speeds.values or [1.0] * num_stages

    def _loads(self, boundaries: Sequence[int]) -> list[list[float]]:
        """Stage seconds of a partition in every batch."""
        cuts = list(zip(pairwise(boundaries), self._speeds(len(boundaries) - 1), strict=True))
        return [
            [(until[high] - until[low]) / speed for (low, high), speed in cuts]
            for until in self.seconds_until
        ]

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, each profile once."""
        same = all(a is b for a, b in zip(reversed(self._newest), reversed(self._profiles), strict=False))
        measured: dict[str, Any] = {} if same else {"newest": list(self._newest)}
        if any(a is not b for a, b in zip(reversed(self._measured), reversed(self._profiles), strict=False)):
            measured["measured"] = list(self._measured)
        return {
            "profiles": list(self._profiles), "num_newest": len(self._newest), "speeds": self.speeds.state_dict(),
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
        profiles = state["profiles"] if "profiles" in state else list(map(self._at_unit_speed, state["newest"]))
        # Older checkpoints keep no profile as it was measured where speeds are given.
        measured = state.get("measured", profiles if self._config.stage_speeds is None else [])
        self._measured = deque(measured if same_stages else [], maxlen=HISTORY)
        self._profiles = deque(profiles, maxlen=HISTORY)
        seconds_until = state["history"] if "history" in state else map(_seconds_until, profiles)
        self.seconds_until = deque(map(tuple, seconds_until), maxlen=HISTORY)
        newest = state.get("newest", profiles[len(profiles) - state.get("num_newest", 0) :])
        self._newest = deque(newest if same_stages else [], maxlen=self._config.profile_batches)


def _seconds_until(profile: PipelineProfile) -> tuple[float, ...]:
    """Seconds of the first 0, 1, ... L layers."""
    return tuple(accumulate(profile.costs("time"), initial=0.0))
