"""Batches on paper: what a balancer asks for is run by the simulator, with true halves that it does not know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from dynpipe_ds.decide import Balancer
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile, StageProfile
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import Workload, simulate


@dataclass
class OnPaper:
    """A pipeline and its balancer.

    Args:
        forward_s: true seconds of every layer; a whole backward takes twice as long.
        boundaries: the partition, moved where the balancer decides it.
        num_micro_batches: M.
        weight_share: of both halves of a backward, the second one.
        split_cost: both halves over the whole.
        slowness: of planned orders, over what the simulator says.
        unsplit: layers whose backward can't be split.
    """

    forward_s: Sequence[float]
    boundaries: tuple[int, ...]
    num_micro_batches: int = 8
    weight_share: float = 0.5
    split_cost: float = 1.0
    slowness: float = 1.0
    unsplit: Sequence[int] = ()
    orders: list[Order | None] = field(default_factory=list)
    trials: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def true(self) -> PipelineProfile:
        """What whole backwards take, and their halves."""
        layers = tuple(
            LayerProfile(
                f"l{i}", f, 2 * f, 10, 40, 40, 80, 1000,
                weight_s=0.0 if i in self.unsplit else 2 * f * self.split_cost * self.weight_share,
                split_s=0.0 if i in self.unsplit else 2 * f * (self.split_cost - 1),
            )
            for i, f in enumerate(self.forward_s)
        )
        return PipelineProfile(0, self.boundaries, self.num_micro_batches, layers, ())

    def measured(self, batch: int, order: Order | None) -> PipelineProfile:
        """A batch that runs an order, as the profiler sees it."""
        true = self.true()
        ran = simulate(Workload.from_profile(true), order or "1f1b")
        slowness = self.slowness if order is not None and batch not in self.trials else 1.0
        layers = []
        for layer, stage in zip(true.layers, true.placement.layer_stages, strict=True):
            share = 0.0 if order is None else len(order.split(stage)) / self.num_micro_batches
            if share == 1.0:
                layer = replace(layer, backward_s=layer.backward_s + layer.split_s, split_s=0.0)
            layers.append(layer if share else replace(layer, weight_s=0.0, split_s=0.0))
        stages = tuple(
            StageProfile(stage.busy_s, ran.makespan_s * slowness - stage.busy_s, 0.0, 0.0, ran.makespan_s * slowness, 0)
            for stage in ran.stages
        )
        return PipelineProfile(batch, self.boundaries, self.num_micro_batches, tuple(layers), stages)

    def train(self, balancer: Balancer, num_batches: int, *, first: int = 0) -> None:
        """Run batches, each profiled, as the engine does."""
        for batch in range(first, first + num_batches):
            order = balancer.ordering.next(is_profiled=True)
            if order is not balancer.ordering.order:
                self.trials.append(batch)
            measured = self.measured(batch, order)
            self.orders.append(order)
            self.seconds.append(measured.stages[0].batch_s)
            balancer.observe(measured)
            decided = balancer.decide(batch, self.boundaries)
            if decided is not None and decided[1].rebalance:
                self.boundaries = decided[0].boundaries
                balancer.moved(batch)
            balancer.ordering.adopt(balancer.ordering.choose(balancer.smoothed(), self.boundaries), self.boundaries)
