"""What is known of a layer with experts while a batch runs, and of what it was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor, nn

from dynpipe_ds import CountedForwards
from scenarios.moe.placing import Lanes
from scenarios.moe.sharded.products import LaneSums, LaneTimes
from scenarios.moe.sharded.relay import Job

Reroute = Callable[[Lanes, list[list[int]]], Lanes]
"""From a placement and the rows ``[R][E]`` of a batch's first micro-batch to a placement with no new copies."""

Planner = Callable[[int, list[list[int]]], Lanes]
"""From a layer's index and the rows ``[R][E]`` of a whole batch to who is to compute them in the next one."""


class Experts(NamedTuple):
    """What a layer brings.

    Attributes:
        module: the layer, or the module in it that has the experts.
        own: this rank's own weights by name, ``[E/R, …]`` each.
    """

    module: nn.Module
    own: Mapping[str, nn.Parameter]


class Summed(NamedTuple):
    """A layer's gradients at home.

    Attributes:
        gradients: means over the replicas, by name.
        num_bytes: of sums that this rank has received.
        seconds: that it took, from the time on at which all ranks had come to it.
    """

    gradients: dict[str, Tensor]
    num_bytes: int
    seconds: float


class Travelled(NamedTuple):
    """What travelled for a layer in a batch, as one rank saw it.

    Attributes:
        trans_bytes: weights received.
        agg_bytes: sums received.
        seconds: that both took.
        hidden_s: seconds of it for which nobody waited.
    """

    trans_bytes: int = 0
    agg_bytes: int = 0
    seconds: float = 0.0
    hidden_s: float = 0.0


@dataclass(frozen=True)
class LayerBatch:
    """What a batch was for a layer.

    Attributes:
        lanes: who has computed what.
        rows: of each rank for each expert, ``[R][E]``.
        num_copies: experts of others that this rank held.
        travelled: weights and sums.
        plan: a placement for the next batch, if this rank was to make one.
        times: of the layer on this rank; ``None`` where nothing could be measured.
    """

    lanes: Lanes
    rows: list[list[int]]
    num_copies: int
    travelled: Travelled
    plan: Job[Lanes] | None
    times: LaneTimes | None


@dataclass
class LayerState:
    """A layer with experts in the batch that runs.

    Attributes:
        index: of the layer.
        experts: of it.
        planned: who is to compute what.
        lanes: who computes it, from the batch's first forward on; ``None`` before.
        rows: of each rank for each expert, so far, ``[R][E]``, of what is trained.
        copies: for each weight by name, by expert.
        sums: for each weight by name.
        trans: copies on their way here or from here, and bytes received.
        agg: sums on their way.
        num_forwards: trained so far.
        counted: which forwards those are.
        plan: a placement for the next batch, in the making.
        times: of the layer on this rank.
    """

    index: int
    experts: Experts
    planned: Lanes
    rows: list[list[int]]
    copies: dict[str, dict[int, Tensor]]
    sums: dict[str, LaneSums]
    lanes: Lanes | None = None
    trans: Job[int] | None = None
    agg: Job[Summed | None] | None = None
    num_forwards: int = 0
    counted: CountedForwards = field(default_factory=CountedForwards)
    plan: Job[Lanes] | None = None
    times: LaneTimes = field(default_factory=LaneTimes)
