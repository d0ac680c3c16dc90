"""One replayed training run as a value: trace, pipeline, method, network, workers; and what came out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.paper.algorithms import probed
from benchmarks.replay.clocks import Costs
from benchmarks.traces import Trace, TraceBatch
from benchmarks.traces.equations import EQUATIONS
from benchmarks.traces.models import MODELS
from dynpipe_ds.partition import balanced, partitioner_names, register_partitioner
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import Workload

PROBED = "probed"
"""The paper's partitioner, by name at run time."""
LOAD_MODELS = {**MODELS, **EQUATIONS}
PARAMETERS_A_LAYER = 50_000  # of a replay layer, on the mean; the trace's are scaled down to it
CALIBRATION = Path(__file__).parent / "calibration.json"
WARM_UP = 2  # batches that are not timed
CLOCKS = ("virtual", "sleeping")
COSTS = ("calibrated", "unscaled", "none")
SENDS = ("buffered", "waited")


@dataclass(frozen=True)
class Method:
    """Who decides about the partition.

    Args:
        label: for tables.
        start: the first partition: ``"blocks"`` (as many blocks on every stage, Megatron-LM's) or
            ``"parameters"`` (DeepSpeed's).
        partitioner: at run time; empty for a static partition.
        cost: ``"time"`` or ``"parameters"``.
        auto: our controller instead of a fixed interval.
        knows_speeds: whether it is told of slower workers.
        schedule: in which order batches run: ``"1f1b"``, ``"planned"`` or ``"auto"``.
        activation_budget: activations that a worker may hold, as a multiple of what the fullest holds under 1F1B.
    """

    label: str
    start: str = "blocks"
    partitioner: str = ""
    cost: str = "time"
    auto: bool = False
    knows_speeds: bool = False
    schedule: str = "1f1b"
    activation_budget: float = 1.0

    def section(self, every: int, speeds: Sequence[float]) -> dict[str, Any]:
        """The ``dynamic_pipeline`` section.

        Args:
            every: interval of the methods that have one, in batches.
            speeds: relative speed of every stage.
        """
        section: dict[str, Any] = {"enabled": True, "schedule": self.schedule}
        section["activation_budget"] = self.activation_budget
        section["profile_every"] = 1  # results say what every batch took
        section["cross_memory"] = False  # messages take the time along
        if not self.partitioner:
            return section | {"rebalance_every": "never"}
        if self.partitioner == PROBED and PROBED not in partitioner_names():
            register_partitioner(PROBED, probed)  # on every rank that runs it, and nowhere else
        section |= {"partitioner": self.partitioner, "cost": self.cost}
        if not self.auto:
            # A fixed interval, one profiled batch, any gain: what DynMo does.
            section |= {"rebalance_every": every, "profile_batches": 1, "min_gain": 0.0}
        if self.knows_speeds and len(set(speeds)) > 1:
            section["stage_speeds"] = list(speeds)
        return section


STATIC = (Method("static uniform"), Method("static parameters", start="parameters"))
PAPERS = tuple(Method(f"partition:{cost}", partitioner=PROBED, cost=cost) for cost in ("parameters", "time"))
"""The paper's that can run: its diffusion scatters layers (``benchmarks/paper/verbatim.py``)."""
VARIANTS = tuple(
    Method(f"{label}:{cost}", partitioner=partitioner, cost=cost)
    for label, partitioner in (("balanced", "balanced"), ("contiguous diffusion", "diffusion"))
    for cost in ("parameters", "time")
)
"""DeepSpeed's partitioner of today, and diffusion between neighbours, which is ours."""
OURS = (
    Method("optimal:time", partitioner="optimal", knows_speeds=True),
    Method("optimal:time, auto", partitioner="optimal", auto=True, knows_speeds=True),
    Method("optimal:time, auto, speeds measured", partitioner="optimal", auto=True),
    Method("simulated:time, auto", partitioner="simulated", auto=True, knows_speeds=True),
)
ORDERS = (
    Method("static uniform, planned order", schedule="planned"),
    Method("optimal:time, auto, auto order", partitioner="optimal", auto=True, knows_speeds=True, schedule="auto"),
    Method("optimal:time, auto, auto order, half more activations", partitioner="optimal", auto=True, knows_speeds=True,
           schedule="auto", activation_budget=1.5),
    *(replace(method, label=f"{method.label}, auto order", schedule="auto") for method in (*STATIC, OURS[0])),
)  # fmt: skip
METHODS: dict[str, Method] = {method.label: method for method in (*STATIC, *PAPERS, *VARIANTS, *OURS, *ORDERS)}


@dataclass(frozen=True)
class Case:
    """One run.

    Args:
        trace: a JSON file, or ``"model:<scenario>:<depth>"``.
        method: label of a :class:`Method`.
        num_stages: S.
        num_micro_batches: M.
        num_batches: length; the trace is stretched or squeezed to it.
        layer_ms: forward and backward milliseconds of a mean layer in the first batch, which all times are
            scaled to; 0: as the trace says.
        every: interval of methods that have one, in batches.
        speeds: relative speed of every stage, or of every worker, a stage's replicas side by side; empty for all alike.
        link_ms: mean delay of a message; 0 for the machine's own.
        link_spread: the delays of messages are ``link_ms`` x N(1, spread), within 0 and 4 (0: none vary).
        seed: of dispersion, jitter and links.
        replicas: data-parallel replicas of every stage, each with dispersion of its own.
        jitter: of every layer's seconds from one micro-batch to the next, relative, besides the trace's dispersion.
        leaves: workers that drop out: after so many batches training goes on with so many stages; pairs, ascending.
        clock: ``"virtual"``: nobody sleeps, time is counted; ``"sleeping"``: layers sleep.
        costs: what all but the layers takes in virtual time: ``"calibrated"``; ``"unscaled"``, the same but that moved
            bytes are those of the replay's small layers, as in sleeping replay; or ``"none"``.
        sends: ``"buffered"``: over at once; ``"waited"``: in sleeping replay, over when the message is sent, as before.
        weight_share: of a layer's backward, what computes the gradients of its parameters and may be done later.
    """

    trace: str
    method: str
    num_stages: int
    num_micro_batches: int
    num_batches: int
    layer_ms: float = 0.0
    every: int = 1
    speeds: tuple[float, ...] = ()
    link_ms: float = 0.0
    link_spread: float = 0.0
    seed: int = 0
    replicas: int = 1
    jitter: float = 0.0
    leaves: tuple[tuple[int, int], ...] = ()
    clock: str = "virtual"
    costs: str = "calibrated"
    weight_share: float = 0.5
    sends: str = "buffered"

    def __post_init__(self) -> None:
        object.__setattr__(self, "speeds", tuple(self.speeds) or (1.0,) * self.num_stages)
        object.__setattr__(self, "leaves", tuple((batch, stages) for batch, stages in self.leaves))
        for name, among in (("method", tuple(METHODS)), ("clock", CLOCKS), ("costs", COSTS), ("sends", SENDS)):
            if getattr(self, name) not in among:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be one of {', '.join(among)}")
        for name in ("num_stages", "num_micro_batches", "every", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be >= 1")
        for name in ("layer_ms", "link_ms", "link_spread", "jitter"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: must be >= 0 and finite")
        if self.sends == "waited" and self.clock == "virtual":
            raise ValueError("sends = 'waited', clock = 'virtual': only sleeping replay can wait for sends")
        if not 0 <= self.weight_share <= 1:
            raise ValueError(f"weight_share = {self.weight_share}: must be from 0 to 1")
        fits = len(self.speeds) in (self.num_stages, self.num_stages * self.replicas)
        if not fits or not all(0 < speed < math.inf for speed in self.speeds):
            raise ValueError(f"speeds = {self.speeds}: need one > 0 for each of {self.num_stages} stages, or workers")
        if self.num_batches <= WARM_UP:
            raise ValueError(f"num_batches = {self.num_batches}: must be more than the {WARM_UP} untimed ones")
        self._check_leaves()

    def _check_leaves(self) -> None:
        last = (0, self.num_stages)
        for batch, stages in self.leaves:
            if not (last[0] < batch < self.num_batches and 1 <= stages < last[1]):
                raise ValueError(
                    f"leaves = {self.leaves}: need pairs of a batch, from 1 to {self.num_batches - 1} and ascending, "
                    f"and the stages that are left, fewer each time than before ({self.num_stages} at the start)"
                )
            last = batch, stages

    def load_trace(self) -> Trace:
        """Read or make the trace, its seconds scaled."""
        num_blocks = len(load_trace(self.trace).layers) - 2  # without embedding and head
        if num_blocks < self.num_stages:
            raise ValueError(f"num_stages = {self.num_stages}: {self.trace} has only {num_blocks} blocks")
        return _scaled(self.trace, self.layer_ms)

    def varies_in(self, moment: TraceBatch) -> bool:
        """Whether batches differ although the trace's batch is the same: micro-batches, or delays of messages.

        Args:
            moment: the trace's batch.
        """
        return bool(moment.dispersion or self.jitter or (self.link_ms and self.link_spread))

    def known_costs(self) -> Costs:
        """What all but the layers takes in virtual time."""
        return Costs() if self.costs == "none" else kept_costs()

    def told_costs(self) -> Costs:
        """Of these, what the simulator is told of: messages in virtual time, which the engine measures, too."""
        return Costs(message_s=self.known_costs().message_s) if self.clock == "virtual" else Costs()

    @property
    def worker_speeds(self) -> np.ndarray:
        """``(S, R)`` relative speeds."""
        speeds = np.array(self.speeds).reshape(self.num_stages, -1)
        return np.broadcast_to(speeds, (self.num_stages, self.replicas))

    @property
    def stage_speeds(self) -> tuple[float, ...]:
        """Of each stage's workers, the slowest one's."""
        return tuple(self.worker_speeds.min(1).tolist())

    def micro_batch_factors(self, moment: TraceBatch, batch: int, replica: int = 0) -> np.ndarray:
        """``(L, M)`` factors of the layers' seconds, log-normal with mean 1, the trace's dispersion and the jitter.

        Args:
            moment: the trace's batch.
            batch: number of the batch in this run.
            replica: data-parallel replica, which has other data.
        """
        num_layers = len(moment.forward_s)
        if not moment.dispersion and not self.jitter:
            return np.ones((num_layers, self.num_micro_batches))
        dispersion = np.array(moment.dispersion or [0.0] * num_layers)
        sigma = np.sqrt(np.log1p(dispersion**2 + self.jitter**2))[:, None]
        draws = np.random.default_rng((self.seed, batch, replica)).normal(size=(num_layers, self.num_micro_batches))
        return np.exp(sigma * draws - sigma**2 / 2)

    def links_s(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """``(S - 1, M)`` seconds of activations and of gradients over every boundary.

        Args:
            batch: number of the batch.
        """
        shape = (2, self.num_stages - 1, self.num_micro_batches)
        draws = np.random.default_rng((self.seed, batch, 1 << 20)).normal(1.0, self.link_spread, shape)
        activation_s, gradient_s = self.link_ms / 1e3 * draws.clip(0.0, 4.0)
        return activation_s, gradient_s

    def workload(
        self, moment: TraceBatch, boundaries: Sequence[int], batch: int, *, replica: int = 0,
        costs: Costs | None = None, order: Order | None = None,
    ) -> Workload:
        """What the simulator needs to know of a batch.

        Args:
            moment: the trace's batch.
            boundaries: S + 1 layer indices.
            batch: number of the batch.
            replica: data-parallel replica.
            costs: of everything but the layers; ``None``: of this case.
            order: that it runs; ``None``: 1F1B. It may be older than what is frozen.
        """
        costs = costs or self.known_costs()
        factors = self.micro_batch_factors(moment, batch, replica)
        slow = 1.0 / self.worker_speeds[:, replica, None]
        spans = list(pairwise(boundaries))

        def stages(seconds: Sequence[float]) -> np.ndarray:
            table = np.array(seconds)[:, None] * factors
            return slow * np.array([table[low:high].sum(0) for low, high in spans])

        trains = np.array([[high > moment.frozen_layers] for high in boundaries[1:]])
        forward_s = stages(moment.forward_s) + costs.forward_s
        told_s = stages(moment.backward_s)  # frozen layers lead, and have none
        backward_s = told_s + costs.backward_s * trains
        frozen = frozen_boundaries(moment, boundaries)
        weight_s = self.weight_share * told_s + costs.weight_s * trains
        if order is not None and order.split(frozen) and frozen:
            # Its first stage that trains sends no gradient any more: all of its backward runs as the second half.
            backward_s[frozen], weight_s[frozen] = told_s[frozen], told_s[frozen] + costs.weight_s
        activation_s, gradient_s = self.links_s(batch)
        return Workload(
            forward_s, backward_s, self.num_micro_batches, activation_link_s=activation_s + costs.message_s,
            gradient_link_s=gradient_s + costs.message_s, step_s=costs.step_s,
            frozen_boundaries=frozen, weight_s=weight_s, split_s=costs.weight_s * trains,
        )


@cache
def kept_costs() -> Costs:
    """The constants that were measured once, with the machine that they were measured on beside them."""
    return Costs(**json.loads(CALIBRATION.read_text(encoding="utf-8"))["costs"])


@cache
def _scaled(spec: str, layer_ms: float) -> Trace:
    trace = load_trace(spec)
    return trace.scaled(layer_ms / 1e3 / trace.mean_layer_s()) if layer_ms else trace


@cache
def load_trace(spec: str) -> Trace:
    """Read a file, or make ``"model:<scenario>:<depth>"``, with ``":halves"`` behind it of halves of blocks.

    Args:
        spec: which.

    Raises:
        ValueError: for a file or model that does not exist, and for a file that is no trace.
    """
    kind, _, rest = spec.partition(":")
    if kind != "model":
        if not Path(spec).is_file():
            raise ValueError(f"trace = {spec!r}: no such file; give one, or model:<{'|'.join(LOAD_MODELS)}>:<blocks>")
        return Trace.load(spec)
    name, _, size = rest.partition(":")
    depth, _, halves = size.partition(":")
    if name not in LOAD_MODELS or not depth.isdigit() or halves not in ("", "halves"):
        raise ValueError(f"trace = {spec!r}: must be a file or model:<{'|'.join(LOAD_MODELS)}>:<blocks>[:halves]")
    return LOAD_MODELS[name](int(depth), halves=bool(halves))


def frozen_boundaries(moment: TraceBatch, boundaries: Sequence[int]) -> int:
    """How many boundaries, from the first on, no gradient crosses.

    Args:
        moment: the trace's batch.
        boundaries: S + 1 layer indices.
    """
    return sum(cut <= moment.frozen_layers for cut in boundaries[1:-1])


def first_boundaries(method: Method, trace: Trace, num_stages: int) -> list[int]:
    """Where a run begins.

    Args:
        method: whose ``start``.
        trace: its layers; the first and the last are embedding and head.
        num_stages: S.

    Returns:
        S + 1 layer indices.
    """
    if method.start == "parameters":
        return list(balanced(trace.batches[0].parameter_bytes, num_stages).boundaries)
    blocks = len(trace.layers) - 2
    size, rest = divmod(blocks, num_stages)
    inner = [1 + stage * size + min(stage, rest) for stage in range(1, num_stages)]
    return [0, *inner, blocks + 2]


@dataclass
class Move:
    """One re-partition.

    Args:
        batch: batches trained before it.
        boundaries: after it.
        plan_s: seconds to decide.
        migrate_s: seconds to move.
        bytes_moved: what travelled.
    """

    batch: int
    boundaries: list[int]
    plan_s: float
    migrate_s: float
    bytes_moved: int


@dataclass
class Result:
    """What one run took.

    Args:
        case: the run.
        kind: ``"replay"``, in virtual time; ``"sleeping replay"``; or ``"simulation"``.
        wall_s: seconds of the timed batches on the replay's clock, from barrier to barrier, everything included.
        batches_s: seconds of every batch on the first rank, rebalancing included.
        bubbles: bubble ratio of every batch.
        stages_s: busy seconds of every stage in every batch.
        moves: re-partitions.
        profiling_s: seconds profiling took, on the timed batches.
        planning_s: seconds planning took.
        migrating_s: seconds moving took.
        parameter_scale: factor of the replay layers' parameter bytes against the trace's.
        first_boundaries: at the start.
        losses: of every batch (replay).
        layers_s: forward and backward seconds of every layer as measured, in every batch (replay): [forward,
            backward, of that the weights' part where it was computed apart] by layer.
        engine_s: seconds of every batch as the engine profiled them, of the slowest stage (replay).
        told_s: simulated seconds of every batch on its partition and in its order: layers, links and messages as
            told, nothing else.
        num_orders: orders that batches ran in (replay).
        step_s: median seconds of the optimizer step of every stage (replay).
        machine_s: seconds that the machine took for all batches (replay).
        works_s: median seconds of the library's work by kind, on the first rank (sleeping replay).
    """

    case: Case
    kind: str
    wall_s: float
    batches_s: list[float]
    bubbles: list[float]
    stages_s: list[list[float]]
    moves: list[Move]
    profiling_s: float
    planning_s: float
    migrating_s: float
    parameter_scale: float
    first_boundaries: list[int]
    losses: list[float] = field(default_factory=list)
    layers_s: list[list[list[float]]] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)
    num_orders: int = 1
    step_s: list[float] = field(default_factory=list)
    machine_s: float = 0.0
    works_s: dict[str, float] = field(default_factory=dict)

    @property
    def throughput(self) -> float:
        """Micro-batches a second over the timed batches, of all replicas."""
        return self.case.replicas * self.case.num_micro_batches * (self.case.num_batches - WARM_UP) / self.wall_s

    @property
    def timed_batches_s(self) -> list[float]:
        """Seconds of the timed batches."""
        return self.batches_s[WARM_UP:]

    @property
    def longer(self) -> float:
        """How many times as long a replay's timed batches were as its layers and links say."""
        return self.wall_s / math.fsum(self.told_s[WARM_UP:])

    def last_throughput(self) -> float:
        """The same over the last quarter of the run, where the model has changed most."""
        last = self.batches_s[-max(1, len(self.batches_s) // 4) :]
        return self.case.replicas * self.case.num_micro_batches * len(last) / math.fsum(last)

    def last_bubble(self) -> float:
        """Mean bubble ratio of the last quarter of the run."""
        return fmean(self.bubbles[-max(1, len(self.bubbles) // 4) :])

    def overhead(self) -> float:
        """Share of the time that went into profiling, planning and moving."""
        return (self.profiling_s + self.planning_s + self.migrating_s) / self.wall_s

    def boundaries_by_batch(self) -> list[list[int]]:
        """The partition that every batch ran on."""
        found = []
        for batch in range(self.case.num_batches):
            past = [move.boundaries for move in self.moves if move.batch <= batch]
            found.append(past[-1] if past else self.first_boundaries)
        return found

    def as_values(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_values(cls, values: dict[str, Any]) -> Result:
        """Undo :meth:`as_values`.

        Args:
            values: what it gave.
        """
        case = Case(**values["case"])
        return cls(**(values | {"case": case, "moves": [Move(**move) for move in values["moves"]]}))


def best(results: Iterable[Result], labels: Iterable[str]) -> Result:
    """The run with the highest throughput among some methods.

    Args:
        results: runs of one scenario and pipeline.
        labels: methods to look at.
    """
    wanted = set(labels)
    return max((r for r in results if r.case.method in wanted), key=lambda r: r.throughput)
