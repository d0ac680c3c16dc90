"""Time of experts that two data-parallel ranks share, by how unevenly the tokens fall on the ranks.

python -m benchmarks.expert_parallel.main [--tokens 1024 --hidden 256 --experts 8 --repeats 15]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist

from benchmarks.ranks import Send, on_ranks
from benchmarks.record import tell
from scenarios.gpt import GPTConfig
from scenarios.moe import ExpertConfig, MoEMLP, set_expert_group
from scenarios.moe.routing import Assignment, token_choice
from scenarios.report.interval import median_of_ratios

# Share of the tokens whose experts are on the first rank.
SHARES = (0.5, 0.625, 0.75, 0.875, 1.0)


def assignment(num_tokens: int, num_experts: int, share: float) -> Assignment:
    """One expert a token, the first half of the experts taking a share of them, evenly within each half."""
    half = num_experts // 2
    index = torch.arange(num_tokens)
    first = index < round(share * num_tokens)
    expert = torch.where(first, index % half, half + index % (num_experts - half))
    return token_choice(expert[:, None], torch.ones(num_tokens, 1), num_experts=num_experts, capacity=None)


def forward_backward_s(mlp: MoEMLP, tokens: torch.Tensor, routed: Assignment) -> tuple[float, float]:
    """Time a forward and backward of the experts.

    Returns:
        Seconds until both ranks are done, and CPU seconds of the rank that computed longest: on a machine with
        other work, only the second is what the experts cost.
    """
    dist.barrier()
    began, began_cpu = time.perf_counter(), time.process_time()
    mlp.compute(tokens, routed).backward(tokens.detach())
    cpu_s = torch.tensor(time.process_time() - began_cpu)
    dist.barrier()
    took_s = time.perf_counter() - began
    dist.all_reduce(cpu_s, op=dist.ReduceOp.MAX)
    mlp.zero_grad()
    return took_s, float(cpu_s)


def measure(options: argparse.Namespace) -> dict[tuple[bool, float], list[tuple[float, float]]]:
    """Times by (experts shared, share of the first rank), all points in turns."""
    torch.manual_seed(dist.get_rank())
    config = GPTConfig(hidden=options.hidden, heads=4)
    mlp = MoEMLP(config, ExpertConfig(num_experts=options.experts, top_k=1))
    tokens = torch.randn(options.tokens, options.hidden).requires_grad_()
    seconds: dict[tuple[bool, float], list[tuple[float, float]]] = {}
    for i in range(options.repeats + 2):
        for shared in (True, False):
            set_expert_group(dist.group.WORLD if shared else None)
            for share in SHARES:
                routed = assignment(options.tokens, options.experts, share)
                times = forward_backward_s(mlp, tokens, routed)
                if i >= 2:
                    seconds.setdefault((shared, share), []).append(times)
    return seconds


def run_rank(send: Send, options: argparse.Namespace) -> None:
    """Measure on this rank; the first tells."""
    seconds = measure(options)
    for share in SHARES:
        cells = [f"{2 * share:.2f} of mean"]
        for shared in (True, False):
            wall_s, cpu_s = (statistics.median(times) for times in zip(*seconds[shared, share], strict=True))
            own, even = ([cpu for _, cpu in seconds[shared, of]] for of in (share, SHARES[0]))
            ratio = median_of_ratios(own, even)
            cells += [f"{1e3 * wall_s:.1f}", f"{1e3 * cpu_s:.1f}", ratio.text(unit="")]
        send("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 1024), ("hidden", 256), ("experts", 8), ("repeats", 15)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    tell([
        f"{options.tokens} tokens a rank, hidden {options.hidden}, {options.experts} experts, one a token",
        "Ratios are medians of pairs, with their 95% intervals.\n",
        "| busiest rank | shared, ms | CPU ms of the busiest | to even | each all, ms | CPU ms | to even |",
        "|---|---|---|---|---|---|---|",
    ], on_ranks(2, run_rank, options))


if __name__ == "__main__":
    main()
