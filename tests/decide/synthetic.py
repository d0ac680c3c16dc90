"""Runs of a controller over layer times that a test makes up: it observes, a real partitioner plans, it judges.

The partitioner plans from the smoothed, noisy profile, so that a plan looks better than it is (it was chosen for
looking good), as it does in training.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide import Balancer, Decision
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.partition import Plan
from dynpipe_ds.simulation import predicted_batches_s

Boundaries = tuple[int, ...]
Model = Callable[[int], Sequence[float]]
"""Batch number to the true forward and backward seconds of every layer."""


def optimal(costs: Sequence[float], num_stages: int, current: Boundaries) -> Plan:
    """Smallest bottleneck by dynamic programming, independent of the package's own."""
    until = [0.0, *accumulate(costs)]
    ends = range(len(costs) + 1)
    best: list[tuple[float, Boundaries]] = [(until[end], (0, end)) for end in ends]
    for stage in range(1, num_stages):
        best = [
            min(
                (
                    (max(best[cut][0], until[end] - until[cut]), (*best[cut][1], end))
                    for cut in range(stage, end)
                ),
                default=(float("inf"), ()),
            )
            for end in ends
        ]
    bottleneck, boundaries = best[-1]
    before = max(until[high] - until[low] for low, high in pairwise(current))
    return Plan(boundaries, bottleneck, before, bytes_to_move=1)


def profile(
    seconds: Sequence[float], boundaries: Boundaries, *, batch: int = 0, num_micro_batches: int = 8
) -> PipelineProfile:
    """One batch with these layer times."""
    layers = tuple(LayerProfile("layer", s / 3, s * 2 / 3, 1, 4, 4, 8, 1) for s in seconds)
    return PipelineProfile(batch, boundaries, num_micro_batches, layers, ())


@cache
def batch_s(seconds: tuple[float, ...], boundaries: Boundaries, num_micro_batches: int) -> float:
    """Seconds of a batch with these layer times."""
    batch = profile(seconds, boundaries, num_micro_batches=num_micro_batches)
    return predicted_batches_s([(batch, boundaries)])[0]


def controller(**section: Any) -> Balancer:
    """A controller with this section."""
    return Balancer(DynamicPipelineConfig(enabled=True, **section))


@dataclass(frozen=True)
class Noise:
    """Relative noise: of each layer, of all layers of a rank together, and threefold spikes."""

    layer: float = 0.0
    rank: float = 0.0
    spike_probability: float = 0.0

    def apply(
        self, seconds: Sequence[float], boundaries: Boundaries, rng: random.Random
    ) -> list[float]:
        """One noisy batch."""
        noisy: list[float] = []
        for low, high in pairwise(boundaries):
            rank = rng.gauss(1.0, self.rank)
            rank *= 3.0 if rng.random() < self.spike_probability else 1.0
            noisy += [s * max(0.05, rank * rng.gauss(1.0, self.layer)) for s in seconds[low:high]]
        return noisy


QUIET = Noise()
NOISES = [
    Noise(layer=0.02, rank=0.02),
    Noise(layer=0.1),
    Noise(rank=0.1),
    Noise(layer=0.05, rank=0.05, spike_probability=0.01),
]


@dataclass
class Run:
    """What a training run did."""

    boundaries: Boundaries
    moved_at: list[int] = field(default_factory=list)
    profiled: list[int] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    num_due: int = 0
    batches_s: float = 0.0
    """True seconds of all batches, as they were cut, without noise and moves."""


def train(
    model: Model,
    start: Boundaries,
    *,
    num_batches: int,
    noise: Noise = QUIET,
    seed: int = 0,
    move_s: float = 0.05,
    num_micro_batches: int = 8,
    **section: Any,
) -> Run:
    """Play the engine: profile, ask, plan, decide, move."""
    rng = random.Random(seed)
    decider, run = controller(**section), Run(start)
    for batch in range(num_batches):
        run.batches_s += batch_s(tuple(model(batch)), run.boundaries, num_micro_batches)
        seconds = noise.apply(model(batch), run.boundaries, rng)  # whether profiled or not: runs draw the same noise
        if not decider.wants_profile(batch):
            continue
        run.profiled.append(batch)
        decider.observe(
            profile(seconds, run.boundaries, batch=batch, num_micro_batches=num_micro_batches)
        )
        if not decider.due(batch):
            continue
        run.num_due += 1
        smoothed = decider.smoothed()
        assert smoothed is not None
        plan = optimal(smoothed.costs("time"), len(start) - 1, run.boundaries)
        run.decisions.append(decider.judge(plan, smoothed))
        if run.decisions[-1].rebalance:
            run.boundaries = plan.boundaries
            run.moved_at.append(batch)
            decider.record_cost(move_s)
            decider.moved(batch)
    return run


def equal_layers(num_layers: int) -> Model:
    """Every layer takes 10 ms, always."""
    return lambda batch: [0.01] * num_layers


def half_gets_cheaper(num_layers: int, at: int) -> Model:
    """The first half of the layers becomes three times cheaper."""
    cheap = [0.01 / 3] * (num_layers // 2) + [0.01] * (num_layers - num_layers // 2)
    return lambda batch: cheap if batch >= at else [0.01] * num_layers


def decide(decider: Balancer, plan: Plan, seconds: Sequence[float], **kwargs: Any) -> Decision:
    """Show the same batch ten times, then ask."""
    for batch in range(10):
        decider.observe(profile(seconds, (0, 4, 8), batch=batch, **kwargs))
    smoothed = decider.smoothed()
    assert smoothed is not None
    return decider.judge(plan, smoothed)


UNEQUAL = [0.01] * 4 + [0.02] * 4  # 40 and 80 ms; 60 and 60 ms after moving a layer
BETTER = Plan((0, 5, 8), 0.06, 0.08)
