"""What is measured of a run while it trains, as plain values for checkpoints and ``results.json`` alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynpipe_ds import PipelineProfile, RebalanceEvent
from dynpipe_ds.schedule import Order, order_of
from dynpipe_ds.simulation import Workload, simulate
from scenarios.scenario import Report

USUAL, PLANNED = "1F1B", "planned"
_MOST_PREDICTIONS = 8  # of one order: simulating a batch takes milliseconds


@dataclass
class Recording:
    """Re-partitions and orders of a run; what the report page shows of them.

    Layer times, partitions and stages are in the run's journal (:mod:`dynpipe_ds.journal`).

    Attributes:
        rebalances: :class:`~dynpipe_ds.RebalanceEvent` as dictionaries.
        orders: from which batch on (``first_batch``) with which ``boundaries`` which kind of ``order`` ran, 1F1B or
            planned, and of its first profiled batches the seconds of forwards and backwards, ``predicted_s`` by the
            simulator from the seconds of layers, and ``measured_s``.
    """

    rebalances: list[dict[str, Any]] = field(default_factory=list)
    orders: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Recording:
        """Undo ``dataclasses.asdict``.

        Args:
            values: what it gave; earlier versions kept more.
        """
        return cls(list(values.get("rebalances", ())), list(values.get("orders", ())))

    def add_order(self, batch: int, boundaries: Sequence[int], order: Order) -> None:
        """Note what a batch is about to run.

        Args:
            batch: index of the batch.
            boundaries: of the stages.
            order: of all of them.
        """
        is_usual = order == order_of("1f1b", order.num_micro_batches, order.num_stages)
        now = {"boundaries": list(boundaries), "order": USUAL if is_usual else PLANNED}
        if not self.orders or any(self.orders[-1][key] != value for key, value in now.items()):
            self.orders.append({"first_batch": batch, **now, "predicted_s": [], "measured_s": []})

    def add_prediction(self, profile: PipelineProfile, order: Order) -> None:
        """Set beside each other what a batch took and what the simulator says of it.

        Args:
            profile: of the batch that :meth:`add_order` noted last.
            order: of that batch.
        """
        phase = self.orders[-1]
        # Under 1F1B no backward is split, but where both halves are measured now and then.
        is_trial = phase["order"] == USUAL and any(layer.weight_s for layer in profile.layers)
        if len(phase["predicted_s"]) < _MOST_PREDICTIONS and not is_trial:
            phase["predicted_s"].append(simulate(Workload.from_profile(profile), order).makespan_s)
            phase["measured_s"].append(max(stage.busy_s + stage.idle_s for stage in profile.stages))

    def add_rebalance(self, event: RebalanceEvent) -> None:
        """Take in a change of partition.

        Args:
            event: as the engine tells it.
        """
        values = dataclasses.asdict(event)
        self.rebalances.append({**values, "before": list(event.before), "after": list(event.after)})


@dataclass
class Measurements:
    """Everything that is measured of a run on this rank; the one list of it.

    Attributes:
        losses: loss of every batch.
        batches_s: seconds of every batch on this rank.
        windows: first batch, batches and seconds, from barrier to barrier, of every timed window.
        timed_overheads_s: seconds spent profiling, planning and migrating in them.
        bubbles: bubble ratio of every timed batch that was profiled.
        imbalances: imbalance of the stages' loads, in the same batches.
        stages_s: busy seconds of every stage, for every profiled batch.
        rebalanced_at: batches after which the partition changed.
        reports: what the scenario reported after every batch.
        resumed_at: batches after which the run was continued from a checkpoint.
        recording: re-partitions and orders.
        validations: after how many batches what loss and perplexity were found, for each evaluation.
        timeline: the newest profiled batch, fields of :class:`~dynpipe_ds.simulation.Interval`; when the run is over.
        whole_backwards: stages that ran backwards whole which an order split, each with its reasons; likewise.
    """

    losses: list[float] = field(default_factory=list)
    batches_s: list[float] = field(default_factory=list)
    windows: list[list[Any]] = field(default_factory=list)
    timed_overheads_s: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    bubbles: list[float] = field(default_factory=list)
    imbalances: list[float] = field(default_factory=list)
    stages_s: list[list[float]] = field(default_factory=list)
    rebalanced_at: list[int] = field(default_factory=list)
    reports: list[Report] = field(default_factory=list)
    resumed_at: list[int] = field(default_factory=list)
    recording: Recording = field(default_factory=Recording)
    validations: list[dict[str, float]] = field(default_factory=list)
    timeline: list[list[Any]] = field(default_factory=list)
    whole_backwards: list[list[Any]] = field(default_factory=list)

    @property
    def timed_s(self) -> float:
        """Seconds of all timed windows."""
        return sum(seconds for _, _, seconds in self.windows)

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Measurements:
        """Undo ``dataclasses.asdict``.

        Args:
            values: what it gave; of earlier versions' values, those that are still measured count.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        kept = {name: value for name, value in values.items() if name in known}
        return cls(**{**kept, "recording": Recording.from_values(values["recording"])})
