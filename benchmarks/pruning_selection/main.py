"""The k largest weights over two ranks: radix select, against gathering every rank's k largest (DynMo, Algorithm 1).

python -m benchmarks.pruning_selection.main [--millions 1 8 32 --repeats 5]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import Send, on_ranks
from benchmarks.record import tell
from scenarios.pruning.gathering import keep_largest_by_gathering
from scenarios.pruning.selection import Masks, keep_largest

CPU = torch.device("cpu")


@contextlib.contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """Count the bytes of all tensors that this rank hands to collectives, its part of a gather or scatter once."""
    total, originals = [0], {name: getattr(dist, name) for name in ("all_reduce", "gather", "scatter")}

    def counting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            total[0] += tensor.nbytes
            return collective(tensor, *args, **kwargs)

        return call

    for name, collective in originals.items():
        setattr(dist, name, counting(collective))
    try:
        yield total
    finally:
        for name, collective in originals.items():
            setattr(dist, name, collective)


def measure(select: Callable[[], Masks], repeats: int) -> tuple[float, int, Masks]:
    """Median seconds from barrier to barrier, bytes, and what was selected."""
    times = []
    for _ in range(repeats):
        dist.barrier()
        started_s = time.perf_counter()
        with counted_bytes() as total:
            masks = select()
        dist.barrier()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times), total[0], masks


def run_rank(send: Send, options: argparse.Namespace) -> None:
    """Measure on this rank; the first tells."""
    rank, group = dist.get_rank(), dist.group.WORLD
    for millions in options.millions:
        torch.manual_seed(rank)
        scores = {rank: [torch.randn(millions * 500_000).abs()]}
        for sparsity in (0.52, 0.9):
            keep = round((1 - sparsity) * millions * 1_000_000)
            radix = measure(lambda: keep_largest(scores, keep, 2, group, CPU)[0], options.repeats)  # noqa: B023
            gathered = measure(lambda: keep_largest_by_gathering(scores, keep, group), options.repeats)  # noqa: B023
            assert torch.equal(radix[2][rank][0], gathered[2][rank][0])
            cells = [f"{value[1] / 1e3:,.0f} | {value[0] * 1e3:,.0f}" for value in (radix, gathered)]
            send(f"| {millions} | {sparsity:.0%} | {cells[0]} | {cells[1]} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    tell([
        "| million weights | sparsity | radix: kB a rank | ms | gathering: kB a rank | ms |",
        "|---|---|---|---|---|---|",
    ], on_ranks(2, run_rank, options))


if __name__ == "__main__":
    main()
