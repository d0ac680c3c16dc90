"""Which runs the tables are made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from benchmarks.paper.published import interval
from benchmarks.replay.case import ORDERS as PLANNED
from benchmarks.replay.case import OURS, STATIC, Case, Result
from benchmarks.replay.predict import predict
from benchmarks.replay.run import describe, run_cases
from benchmarks.traces.equations import ITERATIONS

SCENARIOS = ("pruning", "freezing", "early_exit", "moe", "mod", "sparse_attention")
UNIFORM, OPTIMAL, AUTO = STATIC[0].label, OURS[0].label, OURS[1].label
EVERY = 4  # batches between two decisions of methods with an interval, where the model changes now and then
LINK_SPREAD = 1.0  # of the drawn link delays, relative to their mean; cut off at 4 times the mean
RUN = (
    *(method.label for method in STATIC), "partition:time", "balanced:time", "contiguous diffusion:time", OPTIMAL, AUTO,
    PLANNED[1].label,
)  # fmt: skip
"""Methods of the tables of throughput; all of the paper's are in ``compared``."""
RECORDED_RUN = (UNIFORM, OPTIMAL, AUTO, PLANNED[1].label)
"""Methods that recorded traces are run with."""
REPLAYED_STAGES = 4
"""Most stages that are run on the engine, where every rank is a process; more are simulated (replay/predict.py)."""
SLOW = 1 / 1.5  # speed of the slow worker


@dataclass(frozen=True)
class Size:
    """How much is run.

    Args:
        pipelines: numbers of stages and the blocks of their models; with more than 8 half the batches.
        scenarios: which.
        methods: labels.
        batches: of a run.
        few: stages for the tables of network and workers.
        depths: blocks of the simulated tables.
    """

    pipelines: tuple[tuple[int, int], ...]
    scenarios: tuple[str, ...]
    methods: tuple[str, ...]
    batches: int
    few: tuple[int, ...]
    depths: tuple[int, ...]


FULL = Size(((4, 24), (8, 40), (16, 32), (24, 48)), SCENARIOS, RUN, 40, (4,), (24, 48))
"""One depth on 4, 8 and Figure 3's 24 stages, MoE's 32 blocks on 16. Every depth and size: ``compared``."""
QUICK = Size(((4, 24),), ("freezing", "moe"), (UNIFORM, STATIC[1].label, "partition:time", OPTIMAL), 20, (4,), (24,))

LAYER_MS = 30.0
"""Forward and backward of a dense block."""


def scenario_of(trace: str) -> str:
    """``"moe"`` of ``"model:moe:24"``, of ``"model:moe_cost:24"`` or of a file's name.

    Args:
        trace: of a case.
    """
    name = trace.split(":")[1] if trace.startswith("model:") else Path(trace).stem
    return name.removesuffix("_cost").removesuffix("_equation")


def case(trace: str, method: str, num_stages: int, size: Size, **options: object) -> Case:
    """One run of an experiment.

    Args:
        trace: file or model.
        method: label.
        num_stages: S.
        size: its batches.
        **options: further fields of the case.
    """
    batches = size.batches if num_stages <= 8 else size.batches // 2
    # The paper's interval, in proportion to its 10,000 iterations.
    every = max(1, round(interval(scenario_of(trace)) * batches / ITERATIONS))
    return Case(
        trace, method, num_stages, 4 * num_stages, batches, LAYER_MS, every,
        **options,  # type: ignore[arg-type]
    )


def throughput(size: Size, traces: Sequence[str] = ()) -> list[Case]:
    """Every scenario, method and pipeline (DynPipe Table 2, Figure 3).

    Args:
        size: how much.
        traces: recorded ones to replay instead of the load models.
    """
    return [
        case(trace, method, num_stages, size)
        for num_stages, depth in size.pipelines
        for trace in traces or [f"model:{name}_cost:{depth}" for name in size.scenarios]
        for method in size.methods
        if num_stages != 16 or scenario_of(trace) == "moe"
    ]


def network(size: Size) -> list[Case]:
    """Link delays that are steady, and drawn anew for every message up to four times as long (DynPipe D.2).

    Args:
        size: how much.
    """
    full = len(size.scenarios) > 2
    # A mean delay of a fifth of a dense stage's forward, which is a third of the stage's time.
    delay_ms = {s: LAYER_MS * 24 / s / 15 for s in size.few}
    return [
        case(f"model:{name}:24", method, num_stages, size, link_ms=link * delay_ms[num_stages], link_spread=spread)
        for num_stages in size.few
        for name in (("early_exit", "freezing") if full else ("freezing",))
        for link, spread in ((0.0, 0.0), (1.0, 0.0), (1.0, LINK_SPREAD))
        for method in ((UNIFORM, "balanced:time", OPTIMAL, AUTO) if full else (UNIFORM, OPTIMAL))
    ]


def workers(size: Size) -> list[Case]:
    """One stage, the second, 1.5 times slower.

    Args:
        size: how much.
    """
    full = len(size.scenarios) > 2
    return [
        case(f"model:{name}:24", method, num_stages, size, speeds=speeds)
        for num_stages in size.few
        for name in (("dense", "freezing", "early_exit") if full else ("dense",))
        for speeds in ((1.0,) * num_stages, tuple(SLOW if s == 1 else 1.0 for s in range(num_stages)))
        for method in (
            (UNIFORM, "static parameters", "balanced:time", "contiguous diffusion:time", OPTIMAL, AUTO)
            if full else (UNIFORM, OPTIMAL)
        )
    ]


def replicas(size: Size) -> list[Case]:
    """16 stages with 8 data-parallel replicas, 24 with 30 (Figure 3), for the simulator.

    Args:
        size: how much.
    """
    methods = (UNIFORM, "static parameters", "contiguous diffusion:time", AUTO)
    pipelines = ((16, 8), (24, 30)) if len(size.scenarios) > 2 else ((16, 8),)
    return [
        case(f"model:{name}:{depth}", method, num_stages, size, replicas=count)
        for num_stages, count in pipelines
        for depth in size.depths
        for name in size.scenarios
        for method in methods
    ]


def run(cases: Sequence[Case], raw: Path, processes: int = 1) -> list[Result]:
    """Make the runs that ``raw`` does not hold yet, and add them there; on the engine up to :data:`REPLAYED_STAGES`.

    Args:
        cases: runs.
        raw: file of JSON lines.
        processes: how many simulate at the same time.
    """

    def make(missing: Sequence[Case]) -> Iterator[Result]:
        yield from run_cases([c for c in missing if c.num_stages <= REPLAYED_STAGES])
        yield from _simulated([c for c in missing if c.num_stages > REPLAYED_STAGES], processes)

    return _complete(cases, raw, make)


def simulate_all(cases: Sequence[Case], raw: Path, processes: int = 1) -> list[Result]:
    """Simulate the cases that ``raw`` does not hold yet.

    Args:
        cases: runs.
        raw: file of JSON lines.
        processes: how many simulate at the same time.
    """
    return _complete(cases, raw, lambda missing: _simulated(missing, processes))


def _simulated(cases: Sequence[Case], processes: int) -> Iterator[Result]:
    if processes == 1 or len(cases) < 2:
        yield from map(predict, cases)
        return
    with get_context("forkserver").Pool(processes) as pool:
        yield from pool.imap(predict, cases)


def _complete(cases: Sequence[Case], raw: Path, make: Callable[[Sequence[Case]], Iterable[Result]]) -> list[Result]:
    done = {result.case: result for result in read(raw)}
    raw.parent.mkdir(parents=True, exist_ok=True)
    missing = [c for c in dict.fromkeys(cases) if c not in done]
    if len(missing) < len(set(cases)):
        print(f"{len(set(cases)) - len(missing)} runs of {len(set(cases))} are in {raw} already", flush=True)
    for number, result in enumerate(make(missing) if missing else (), start=1):
        print(f"{number}/{len(missing)} {describe(result)}", flush=True)
        done[result.case] = result
        with raw.open("a") as file:
            file.write(json.dumps(result.as_values()) + "\n")
    return [done[c] for c in dict.fromkeys(cases)]


def read(raw: Path) -> Iterator[Result]:
    """Results of an earlier run.

    Args:
        raw: file of JSON lines; may be missing.
    """
    for line in raw.read_text().splitlines() if raw.exists() else ():
        yield Result.from_values(json.loads(line))


def grouped(results: Iterable[Result]) -> dict[tuple[str, int, str], dict[str, Result]]:
    """Results by (trace, stages, what else differs), then by method.

    Args:
        results: of one experiment.
    """
    found: dict[tuple[str, int, str], dict[str, Result]] = {}
    for result in results:
        c = result.case
        what = "slow worker" if len(set(c.speeds)) > 1 else ""
        if c.link_ms:
            what = "delays vary" if c.link_spread else "steady delays"
        found.setdefault((c.trace, c.num_stages, what), {})[c.method] = result
    return found
