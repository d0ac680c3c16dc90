"""What a batch would take on several partitions and in several orders, by one profile: a comparison for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition import get_partitioner, run_partitioner
from dynpipe_ds.partition.memory import StageMemory
from dynpipe_ds.planning.memory import worker_bytes_of_1f1b
from dynpipe_ds.planning.on_partition import plan_on_partition
from dynpipe_ds.planning.together import plan_batch
from dynpipe_ds.simulation import Simulation, Workload, simulate


@dataclass(frozen=True)
class PredictedBatch:
    """A batch by the simulator: forwards and backwards, with messages, without the optimizer step.

    Attributes:
        partition: how its boundaries came about, in words.
        order: ``"1F1B"`` or ``"planned"``.
        boundaries: S + 1 layer indices; empty where there is no such partition.
        batch_s: seconds; ``None`` where there is none.
        bubble_ratio: idle share, mean over the stages; ``None`` where there is none.
        refusal: why there is none; empty where there is one.
    """

    partition: str
    order: str
    boundaries: tuple[int, ...] = ()
    batch_s: float | None = None
    bubble_ratio: float | None = None
    refusal: str = ""


def predict_batches(
    profile: PipelineProfile,
    first: Sequence[int],
    *,
    config: DynamicPipelineConfig | None = None,
    speeds: Sequence[float] | None = None,
    pinned: Sequence[int] = (),
) -> tuple[PredictedBatch, ...]:
    """Compare the batch that was profiled with what it would be otherwise.

    Args:
        profile: seconds and bytes of every layer, M, the present boundaries; with halves of backwards, planned orders
            are compared as well.
        first: the boundaries that training began with.
        config: the section, for what a stage may hold; ``None``: its defaults.
        speeds: S relative speeds of the workers; ``None``: all alike.
        pinned: cuts that no partition may have.

    Returns:
        The first partition, as many layers a stage, as many parameters, the best cut by time and the present one, under
        1F1B; then the present one and the best together with its order, under planned orders, where halves are known
        and such an order is shorter.

    Raises:
        ValueError: when the profile has no partition, or no times.
    """
    if not profile.boundaries or not any(profile.costs()):
        raise ValueError("the profile has no partition or no times: take one that was measured while training")
    case = _Case(profile, config or DynamicPipelineConfig(), speeds, tuple(pinned))
    present = profile.boundaries
    rows = [
        *([case.on("as it began", first)] if len(first) == len(present) else []),
        case.cut("as many layers a stage", "uniform", "time"),
        case.cut("as many parameters a stage", "optimal", "parameters"),
        case.on("as it is now", present),
        best := case.cut("best cut by time", "optimal", "time"),
    ]  # fmt: skip
    if any(layer.weight_s for layer in profile.layers):
        known = {row.boundaries for row in rows}
        planned = case.planned(present, best.boundaries)
        rows += [row for row in planned if row.order != "1F1B" or row.boundaries not in known]
    return tuple(rows)


class _Case:
    """One profile and what constrains it."""

    def __init__(
        self, profile: PipelineProfile, config: DynamicPipelineConfig, speeds: Sequence[float] | None,
        pinned: tuple[int, ...],
    ) -> None:
        self._profile, self._config, self._speeds = profile, config, speeds
        self._constraints: dict[str, Any] = {"pinned": pinned, "allow_empty": config.allow_empty_stages}

    def on(self, name: str, boundaries: Sequence[int]) -> PredictedBatch:
        workload = Workload.from_profile(self._profile, boundaries, speeds=self._speeds)
        return _predicted(name, "1F1B", boundaries, simulate(workload))

    def cut(self, name: str, partitioner: str, cost: Any) -> PredictedBatch:
        """What a partitioner chooses, which may find no partition."""
        profile, cap = self._profile, self._config.memory_cap_bytes
        memory = StageMemory(
            state_bytes=profile.state_bytes(), activation_bytes=profile.activation_bytes(),
            num_micro_batches=profile.num_micro_batches, cap_bytes=cap or 0,
        )
        try:
            plan = run_partitioner(
                get_partitioner(partitioner), profile.costs(cost), len(profile.boundaries) - 1, profile=profile,
                current=profile.boundaries, layer_bytes=profile.moved_bytes(),
                memory=None if cap is None or partitioner == "uniform" else memory, speeds=self._speeds,
                **self._constraints,
            )
        except ValueError as error:
            return PredictedBatch(name, "1F1B", refusal=" ".join(str(error).split()))
        return self.on(name, plan.boundaries)

    def planned(self, present: tuple[int, ...], best: tuple[int, ...]) -> Iterator[PredictedBatch]:
        """The present partition under the order that is planned for it, and the best of both together."""
        fullest = worker_bytes_of_1f1b(self._profile, present, activation_budget=self._config.activation_budget)
        cap = self._config.memory_cap_bytes
        caps = cap if isinstance(cap, list) else [fullest if cap is None else cap] * (len(present) - 1)
        most = [min(fullest, each) for each in caps]
        name = "as it is now, in another order"
        try:
            planned = plan_on_partition(self._profile, present, most, speeds=self._speeds)
            yield _predicted(name, "1F1B" if planned.is_1f1b else "planned", present, planned.simulation)
            name = "best cut and order together"
            both = plan_batch(
                self._profile, [present, *([best] if best else [])], worker_bytes=most, speeds=self._speeds,
                **self._constraints,
            )
            order = "1F1B" if both.planned.is_1f1b else "planned"
            yield _predicted(name, order, both.placement.boundaries, both.planned.simulation)
        except ValueError as error:
            yield PredictedBatch(name, "planned", refusal=" ".join(str(error).split()))


def _predicted(name: str, order: str, boundaries: Sequence[int], batch: Simulation) -> PredictedBatch:
    return PredictedBatch(name, order, tuple(boundaries), batch.makespan_s, batch.bubble_ratio)
