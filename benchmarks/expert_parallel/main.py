"""Time of experts that two data-parallel ranks share, by how unevenly the tokens fall on the ranks.

python -m benchmarks.expert_parallel.main [ranks --tokens 1024 --hidden 256 --experts 8 --repeats 15]
python -m benchmarks.expert_parallel.main lanes     # one product a lane against one an expert, in one process
python -m benchmarks.expert_parallel.main --quick   # both, few repeats
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.expert_parallel import lanes as products
from benchmarks.ranks import Send, on_ranks
from benchmarks.record import RESULTS, add_force, environment, force, save, table
from dynpipe_ds import Replica
from scenarios.gpt import GPTConfig
from scenarios.moe import ExpertConfig, MoEMLP, set_expert_group
from scenarios.moe.measuring import measured_constants
from scenarios.moe.placing import Lanes, LayerModel, balance, plan
from scenarios.moe.routing import Assignment, token_choice
from scenarios.moe.sharded import Experts, Sharing, keep_own_rows, share_experts
from scenarios.report.interval import median_of_ratios

# Share of the tokens whose experts are on the first rank.
SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)
SHARED, ALL, STATIC, LANES = "shared", "each all", "sharded, static", "sharded, lanes"
WAYS = (SHARED, ALL, STATIC, LANES)

Run = Callable[[torch.Tensor, Assignment], None]
"""Forward and backward of the experts."""


def assignment(num_tokens: int, num_experts: int, share: float) -> Assignment:
    """One expert a token, the first half of the experts taking a share of them, evenly within each half."""
    half = num_experts // 2
    index = torch.arange(num_tokens)
    first = index < round(share * num_tokens)
    expert = torch.where(first, index % half, half + index % (num_experts - half))
    return token_choice(expert[:, None], torch.ones(num_tokens, 1), num_experts=num_experts, capacity=None)


def forward_backward_s(run: Run, tokens: torch.Tensor, routed: Assignment) -> tuple[float, float]:
    """Time a forward and backward of the experts.

    Returns:
        Seconds until both ranks are done, and CPU seconds of the rank that computed longest: on a machine with
        other work, only the second is what the experts cost.
    """
    dist.barrier()
    began, began_cpu = time.perf_counter(), time.process_time()
    run(tokens, routed)
    cpu_s = torch.tensor(time.process_time() - began_cpu)
    dist.barrier()
    took_s = time.perf_counter() - began
    dist.all_reduce(cpu_s, op=dist.ReduceOp.MAX)
    return took_s, float(cpu_s)


def replicated(mlp: MoEMLP, *, shared: bool) -> Run:
    """Experts of which every rank has all: they are shared, or each rank computes its own tokens."""

    def run(tokens: torch.Tensor, routed: Assignment) -> None:
        set_expert_group(dist.group.WORLD if shared else None)
        mlp.compute(tokens, routed).backward(tokens.detach())
        mlp.zero_grad()

    return run


def sharded(mlp: MoEMLP, sharing: Sharing, placed: Lanes) -> Run:
    """Experts of which every rank has some, under a placement: copies and sums of gradients are on their way, too."""

    def run(tokens: torch.Tensor, routed: Assignment) -> None:
        sharing.begin({0: Experts(mlp, mlp.expert_weights())}, {0: placed}, 1)
        mlp.compute(tokens, routed).backward(tokens.detach())
        mlp.finish_gradients()
        sharing.take_done()

    return run


@dataclass(frozen=True)
class Point:
    """What was measured of one share.

    Args:
        share: of the tokens, that wants experts of the first rank.
        placement: that was planned, and its balance.
        seconds: (wall, CPU) of every repeat, by way.
    """

    share: float
    placement: tuple[str, float]
    seconds: dict[str, list[tuple[float, float]]]


def measure(options: argparse.Namespace) -> list[Point]:
    """Time all ways at all shares, in turns."""
    torch.manual_seed(dist.get_rank())
    config, experts = GPTConfig(hidden=options.hidden, heads=4), ExpertConfig(num_experts=options.experts, top_k=1)
    whole, part = MoEMLP(config, experts), MoEMLP(config, experts)
    keep_own_rows(part, ("up", "down"), Replica(dist.get_rank(), dist.get_world_size()))
    part.is_sharded = True
    group, width = dist.group.WORLD, config.mlp_ratio * config.hidden
    assert group is not None
    ranks = list(range(dist.get_world_size()))
    sharing = Sharing(
        group, dist.new_group(ranks), dist.new_group(ranks), num_experts=options.experts, device=torch.device("cpu")
    )
    share_experts(sharing)
    model = LayerModel(measured_constants(
        group, [(width, config.hidden), (config.hidden, width)], dtype=torch.float32, sum_dtype=torch.float32,
        device=torch.device("cpu"), num_micro_batches=1,
    ))  # fmt: skip
    tokens = torch.randn(options.tokens, options.hidden).requires_grad_()
    cases: list[tuple[Point, Assignment, Mapping[str, Run]]] = []
    for share in SHARES:
        routed = assignment(options.tokens, options.experts, share)
        loads = [routed.counts.tolist()] * len(ranks)
        placed = plan("lanes", loads, model)
        cases.append((Point(share, (str(placed), balance(placed, loads)), {way: [] for way in WAYS}), routed, {
            SHARED: replicated(whole, shared=True), ALL: replicated(whole, shared=False),
            STATIC: sharded(part, sharing, Lanes.static(len(ranks), options.experts)),
            LANES: sharded(part, sharing, placed),
        }))  # fmt: skip
    for turn in range(options.repeats + 2):
        for point, routed, runs in cases:
            for way in WAYS if turn % 2 else reversed(WAYS):
                times = forward_backward_s(runs[way], tokens, routed)
                if turn >= 2:
                    point.seconds[way].append(times)
    share_experts(None)
    sharing.close()
    return [point for point, *_ in cases]


def run_rank(send: Send, options: argparse.Namespace) -> None:
    """Measure on this rank; the first tells."""
    send(measure(options))


def report(options: argparse.Namespace, points: Sequence[Point]) -> tuple[dict[str, Any], str]:
    """Turn points into values and text.

    Args:
        options: of the command line.
        points: by share.
    """
    rows, values = [], []
    for point in points:
        own, even = (
            {way: [cpu_s for _, cpu_s in of.seconds[way]] for way in WAYS} for of in (point, points[0])
        )  # fmt: skip
        medians = {way: statistics.median(each) for way, each in own.items()}
        to_even = {way: median_of_ratios(own[way], even[way]) for way in WAYS}
        over = {way: median_of_ratios(own[LANES], own[way]) for way in (SHARED, ALL, STATIC)}
        rows.append([
            f"{2 * point.share:.2f}",
            *(f"{1e3 * medians[way]:.1f} ({to_even[way].value:.2f})" for way in WAYS),
            *(over[way].text(unit="") for way in over), f"{point.placement[1]:.2f}", f"`{point.placement[0]}`",
        ])  # fmt: skip
        values.append({
            "busiest": 2 * point.share, "placement": point.placement[0], "balance": point.placement[1],
            "cpu_s": medians, "to_even": {way: each.value for way, each in to_even.items()},
            "wall_s": {way: statistics.median(wall_s for wall_s, _ in point.seconds[way]) for way in WAYS},
            "lanes_over": {way: [each.value, each.low, each.high] for way, each in over.items()},
        })  # fmt: skip
    head = (
        "rows wanted of the busier rank, over the mean", *(f"{way}, ms (to even)" for way in WAYS),
        *(f"lanes over {way}" for way in (SHARED, ALL, STATIC)), "computed by the busier rank, lanes", "placement",
    )  # fmt: skip
    text = "\n\n".join([
        "# Experts on two ranks, by skew",
        f"{options.tokens} tokens a rank, hidden {options.hidden}, {options.experts} experts, one a token; CPU time of "
        "the busier rank, forward and backward, medians of turns; ratios are medians of pairs, with 95% intervals.",
        table(head, rows),
        "\n".join([
            "- *Shared* and *each all*: replicated experts. Adding their gradients up over the ranks, which DeepSpeed "
            "does, is not in it.",
            "- *Sharded*: copies, and sums of gradients on their way home, are in it. *Lanes*: planned from the same "
            "rows with constants measured at the start by the clock.",
        ]),
    ])  # fmt: skip
    return {"points": values}, text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=("ranks", "lanes", "all"), default="all")
    parser.add_argument("--quick", action="store_true", help="few repeats")
    for name, default in (("tokens", 1024), ("hidden", 256), ("experts", 8), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULTS / "experts")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    if options.quick:
        options.repeats = 3
    ending = "_quick" if options.quick else ""
    if options.table != "lanes":
        machine = environment()
        [points] = on_ranks(2, run_rank, options)
        values, text = report(options, points)
        save(options.out, f"two_ranks{ending}", {"environment": machine, **values}, text)
    if options.table != "ranks":
        machine = environment(1)
        costs = list(products.measure(repeats=options.repeats if options.quick else 40))
        values, text = products.report(costs)
        save(options.out, f"lane_cost{ending}", {"environment": machine, **values}, text)


if __name__ == "__main__":
    main()
