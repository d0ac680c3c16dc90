"""CPU time of one product a lane against one product an expert, in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import table
from scenarios.moe.experts import run_experts
from scenarios.moe.sharded.exchange import Span
from scenarios.moe.sharded.products import LaneSums, LaneWeights, mlp
from scenarios.report.interval import Estimate, median_of_ratios

ROWS, GOAL_ROWS, GOAL = (128, 64, 32), 128, 1.05
LANES = (2, 4)
MICRO_BATCHES = 4  # of a batch; the gradients of the later ones are added to those of the first


@dataclass(frozen=True)
class Cost:
    """Of some rows a lane.

    Args:
        rows: of each lane.
        lanes: of each expert.
        whole_s: CPU seconds of one product an expert, forward and backward; the fastest.
        lanes_s: the same of one product a lane.
        ratio: medians of the pairs' ratios.
        with_sums: the same, the lanes' gradients added up as their expert's home does.
        products: ratio of the fastest of the products alone.
    """

    rows: int
    lanes: int
    whole_s: float
    lanes_s: float
    ratio: Estimate
    with_sums: Estimate
    products: float

    @property
    def fastest(self) -> float:
        """Ratio of the fastest: what another program holds up is never among them."""
        return self.lanes_s / self.whole_s


def cpu_s(run: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    began = time.process_time()
    run()
    return time.process_time() - began


def measure(*, hidden: int = 256, width: int = 1024, experts: int = 4, repeats: int = 16) -> Iterator[Cost]:
    """Measure in turns.

    Args:
        hidden: of a row.
        width: of an expert.
        experts: of the rank.
        repeats: of each.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    up, down = torch.nn.Parameter(torch.randn(experts, width, hidden)), torch.randn(experts, hidden, width)
    weights = {"up": up, "down": torch.nn.Parameter(down)}
    for rows in ROWS:
        for lanes in LANES:
            x = torch.randn(rows * lanes * experts, hidden, requires_grad=True)
            yield _cost(x, weights, rows, lanes, experts, repeats)


def _cost(x: Tensor, weights: dict[str, torch.nn.Parameter], rows: int, lanes: int, experts: int, repeats: int) -> Cost:
    places = [(source, expert) for source in range(lanes) for expert in range(experts)]
    spans = [Span(*place, rows * index, rows * (index + 1)) for index, place in enumerate(places)]
    counts, answer = torch.full((experts,), rows * lanes), torch.randn_like(x)
    found: dict[str, dict[tuple[int, int], Tensor]] = {}

    def whole() -> None:
        for _ in range(MICRO_BATCHES):
            y = run_experts(x, counts, weights["up"], weights["down"], experts=range(experts), kernel="loop")
            y.backward(answer)

    def by_lane() -> None:
        sums = {name: LaneSums(torch.float32) for name in weights}
        up, down = (LaneWeights(0, {}, sums[name]) for name in ("up", "down"))
        for _ in range(MICRO_BATCHES):
            mlp(x, weights["up"], weights["down"], up, down, spans).backward(answer)
        for name, each in sums.items():
            taken = {place: each.take(place) for place in places}
            found[name] = {place: tensor for place, tensor in taken.items() if tensor is not None}

    def add_up() -> None:
        for name, weight in weights.items():
            gradient = torch.zeros_like(weight, requires_grad=False)
            for expert in range(experts):
                own = found[name][0, expert]
                for source in range(1, lanes):
                    own += found[name][source, expert]
                torch.div(own, lanes, out=gradient[expert])

    seconds: list[tuple[float, float, float]] = []
    for turn in range(repeats + 2):
        order = (whole, by_lane) if turn % 2 else (by_lane, whole)
        took = {}
        for run in order:
            took[run] = cpu_s(run)
            x.grad = weights["up"].grad = weights["down"].grad = None
        if turn >= 2:
            seconds.append((took[whole], took[by_lane], took[by_lane] + cpu_s(add_up)))
    wholes, apart, summed = (list(each) for each in zip(*seconds, strict=True))
    return Cost(
        rows, lanes, min(wholes), min(apart), median_of_ratios(apart, wholes), median_of_ratios(summed, wholes),
        _products_s(x, weights, rows, experts * lanes) / _products_s(x, weights, rows * lanes, experts),
    )  # fmt: skip


def _products_s(x: Tensor, weights: dict[str, torch.nn.Parameter], rows: int, count: int) -> float:
    """CPU seconds of all products of a forward and a backward, of ``count`` times ``rows``; the fastest of many."""
    up, down = (weight.detach() for weight in weights.values())
    outer, inner = x.detach(), torch.randn(len(x), up.shape[1])
    to_inner, to_outer = torch.empty_like(inner), torch.empty_like(outer)
    for_up, for_down = torch.empty_like(up[0]), torch.empty_like(down[0])
    parts = [(slice(rows * i, rows * (i + 1)), i * len(up) // count) for i in range(count)]

    def products() -> None:
        for part, expert in parts:
            torch.mm(outer[part], up[expert].t(), out=to_inner[part])
        for part, expert in parts:
            torch.mm(inner[part], down[expert].t(), out=to_outer[part])
        for part, expert in parts:
            torch.mm(outer[part], down[expert], out=to_inner[part])
            torch.mm(outer[part].t(), inner[part], out=for_down)
        for part, expert in parts:
            torch.mm(inner[part], up[expert], out=to_outer[part])
            torch.mm(inner[part].t(), outer[part], out=for_up)

    return min(cpu_s(products) for _ in range(30))


def report(costs: Sequence[Cost], *, hidden: int = 256, width: int = 1024) -> tuple[dict[str, Any], str]:
    """Turn costs into values and text.

    Args:
        costs: of :func:`measure`.
        hidden: of a row.
        width: of an expert.
    """
    rows = [
        [
            str(cost.rows), str(cost.lanes), f"{1e3 * cost.whole_s:.1f}", f"{1e3 * cost.lanes_s:.1f}",
            f"{cost.fastest:.3f}", cost.ratio.text(".3f", ""), cost.with_sums.text(".3f", ""),
            f"{cost.products:.3f}",
        ]
        for cost in costs
    ]  # fmt: skip
    lines = [
        f"{cost.rows} rows, {cost.lanes} lanes an expert: {cost.fastest:.3f} (goal {GOAL}: "
        f"{'reached' if cost.fastest <= GOAL else 'not reached'})."
        for cost in costs if cost.rows == GOAL_ROWS
    ]  # fmt: skip
    head = (
        "rows a lane", "lanes an expert", "one product an expert, ms", "one a lane, ms", "ratio of the fastest",
        "median of pairs", "the same with adding up", "products alone",
    )  # fmt: skip
    text = "\n\n".join([
        "# One product a lane against one an expert",
        f"CPU time of forward and backward of a batch of {MICRO_BATCHES} micro-batches, one process of one thread, 4 "
        f"experts of hidden size {hidden} and width {width}; in turns. Milliseconds are those of the fastest. *Adding "
        "up*: the lanes' gradients into their expert's, at home, once a batch. *Products alone*: the ratio of the same "
        "products, each by one call of torch.mm, one kind after the other over all lanes, and nothing else.",
        table(head, rows), "\n".join(f"- {line}" for line in lines),
    ])  # fmt: skip
    return {"costs": [asdict(cost) | {"fastest": cost.fastest} for cost in costs]}, text
