"""What a re-packing decision is made from, and what follows from it for a given partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, median

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition import StageMemory, check_boundaries
from dynpipe_ds.planning import plan_order
from dynpipe_ds.release.base import Constraints
from dynpipe_ds.repacking.survivors import Workers
from dynpipe_ds.simulation import Workload, simulate

Holders = Sequence[int | None]
"""For each stage of another pipeline the present stage whose workers run it; ``None``: workers that wait."""


@dataclass(frozen=True)
class Request:
    """What a decision is made from.

    Args:
        profile: seconds and bytes of every layer, and M; layer times at unit speed if speeds are given.
        current: present boundaries, S + 1 layer indices.
        workers: where the S stages run.
        constraints: of the release back-end.
        memory_cap_bytes: most bytes a stage may hold; one number, or one for each present stage, which then belongs
            to its workers; ``None``: no cap.
        stage_speeds: relative speed of each present stage's workers; ``None``: all alike.
        pinned: forbidden cuts.
        more_stages: how many stages the workers that wait could run. Nothing is known of them: they are taken to be as
            fast as the usual one of those at work, with as much memory as the one with the least.
        most_stages: how many stages there were workers for at most. What they would reach is what a smaller number is
            measured against, or shrinking step by step would lose the tolerance each time.
        others: the same layers in other numbers of micro-batches of the same batch.

    Raises:
        ValueError: the values do not fit together.
    """

    profile: PipelineProfile
    current: tuple[int, ...]
    workers: Workers
    constraints: Constraints = Constraints()
    memory_cap_bytes: int | Sequence[int] | None = None
    stage_speeds: Sequence[float] | None = None
    pinned: Sequence[int] = ()
    more_stages: int = 0
    most_stages: int = 0
    others: tuple[PipelineProfile, ...] = ()

    def __post_init__(self) -> None:
        checked = check_boundaries(
            self.current, num_layers=len(self.profile.layers), num_stages=self.workers.num_stages, allow_empty=True
        )
        object.__setattr__(self, "current", checked)
        for name in ("memory_cap_bytes", "stage_speeds"):
            given = getattr(self, name)
            if isinstance(given, Sequence) and len(given) != self.num_stages:
                raise ValueError(f"{name} = {given}: need one for each of {self.num_stages} stages")

    @property
    def num_stages(self) -> int:
        """Present number of stages S."""
        return self.workers.num_stages

    @property
    def workers_differ(self) -> bool:
        """Whether it matters for speed or memory which workers stay."""
        caps = self.memory_cap_bytes if isinstance(self.memory_cap_bytes, Sequence) else ()
        return len(set(self.stage_speeds or ())) > 1 or len(set(caps)) > 1

    @property
    def most_usable(self) -> int:
        """Most stages that have a layer each: cuts that are pinned part none."""
        return len(self.profile.layers) - len({cut for cut in self.pinned if 0 < cut < len(self.profile.layers)})

    def alternatives(self) -> list[Request]:
        """The same in each other number of micro-batches."""
        return [replace(self, profile=other, others=()) for other in self.others]

    def memory(self, holders: Holders) -> StageMemory | None:
        """What layers need and what the given stages' workers may hold; ``None`` without a cap."""
        cap = self.memory_cap_bytes
        if cap is None:
            return None
        if isinstance(cap, Sequence):
            return self._memory([min(cap) if holder is None else cap[holder] for holder in holders])
        return self._memory(cap)

    def stage_bytes(self, boundaries: Sequence[int]) -> tuple[int, ...]:
        """Bytes that every stage of a partition holds at its peak under 1F1B."""
        return self._memory(0).stage_bytes(boundaries)

    def speeds(self, holders: Holders) -> list[float] | None:
        """Relative speeds of the given stages' workers."""
        speeds = self.stage_speeds
        if speeds is None:
            return None
        return [median(speeds) if holder is None else speeds[holder] for holder in holders]

    def batch_s(self, boundaries: Sequence[int], holders: Holders) -> float:
        """Predicted seconds of a batch with fill, drain and the optimizer step: 1F1B, or a planned order if shorter.

        Orders are planned where the profile has halves of backwards, which are measured only where they may run. A
        message takes what the present boundaries' take on average: which boundaries another number has is not known,
        and no number may look better for not having been measured.

        Args:
            boundaries: n + 1 layer indices.
            holders: whose workers run the n stages.
        """
        speeds = self.speeds(holders)
        layer_step_s = list(accumulate(self._layer_step_s(), initial=0.0))
        step_s = [layer_step_s[end] - layer_step_s[first] for first, end in pairwise(boundaries)]
        if speeds is not None:
            step_s = [seconds / speed for seconds, speed in zip(step_s, speeds, strict=True)]
        step_s = [max(0.0, seconds) for seconds in step_s]  # a difference of sums rounds
        link_s = self._link_s()
        workload = Workload.from_profile(
            self.profile, boundaries, step_s=step_s, speeds=speeds, activation_link_s=link_s, gradient_link_s=link_s
        )
        usual_s = simulate(workload).batch_s
        if not workload.weight_s.any():
            return usual_s
        return min(usual_s, plan_order(workload, effort=0).simulation.batch_s)

    def _link_s(self) -> float:
        measured = [seconds for seconds in self.profile.link_s if seconds is not None]
        return fmean(measured) if measured else 0.0

    def _memory(self, cap: int | list[int]) -> StageMemory:
        profile = self.profile
        return StageMemory(profile.state_bytes(), profile.activation_bytes(), profile.num_micro_batches, cap)

    def _layer_step_s(self) -> list[float]:
        """Step seconds of every layer at unit speed: its stage's, by its share of optimizer state."""
        seconds = [0.0] * len(self.profile.layers)
        if not self.profile.stages:
            return seconds
        speeds = self.stage_speeds or [1.0] * len(self.profile.stages)
        for (first, end), stage, speed in zip(
            pairwise(self.profile.boundaries), self.profile.stages, speeds, strict=True
        ):
            held = [layer.optimizer_state_bytes for layer in self.profile.layers[first:end]]
            for layer, state in enumerate(held, start=first):
                seconds[layer] = stage.step_s * speed * state / sum(held) if state else 0.0
        return seconds
