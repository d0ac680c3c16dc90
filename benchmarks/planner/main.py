"""How long the partitioners take, and how good their partitions are.

    OMP_NUM_THREADS=1 python -m benchmarks.planner.main
    OMP_NUM_THREADS=1 python -m benchmarks.planner.main --budget 5 --samples 20

Prints Markdown tables. It asserts nothing; the numbers belong in the README beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.record import ending, environment, in_words
from dynpipe_ds.partition import Plan, StageMemory, balanced, diffusion, optimal

# (layers, stages) for all partitioners. DeepSpeed's takes about layers^2 * stages steps.
SIZES = ((96, 24), (512, 64), (1000, 64), (1000, 128), (1000, 256))
QUALITY_SIZES = ((24, 4), (48, 8), (96, 24))
SPREADS = (0.3, 1.0)  # sigma of the log-normal costs


def main() -> None:
    """Print the environment and both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for one DeepSpeed run")
    parser.add_argument("--repeats", type=int, default=20, help="runs of which the median is shown")
    parser.add_argument("--samples", type=int, default=100, help="random models a quality row")
    arguments = parser.parse_args()
    found = environment(threads=1)
    print(in_words(found), end="\n\n")
    balanced([1.0, 1.0], 2)  # loads DeepSpeed, which takes seconds the first time
    print_times(arguments.budget, arguments.repeats)
    print_quality(arguments.samples)
    print(*ending(found), sep="\n", end="")


def print_times(budget_s: float, repeats: int) -> None:
    """Print the milliseconds of each partitioner for each size."""
    print("Milliseconds of processor time: median (least) of the repeats; `balanced` once\n")
    print(
        "| layers | stages | sigma | optimal | with current | with current, caps | "
        "with current, speeds | diffusion | balanced (DeepSpeed) |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    seconds_per_step = 0.0
    for sigma in SPREADS:
        for num_layers, num_stages in SIZES:
            cells = [time_cell(call, repeats) for call in fast_calls(num_layers, num_stages, sigma)]
            steps = num_layers**2 * num_stages
            if steps * seconds_per_step < budget_s:
                costs = random_costs(num_layers, sigma, seed=0)
                seconds = timed(lambda c=costs, s=num_stages: balanced(c, s))
                seconds_per_step = seconds / steps
                cells.append(f"{1e3 * seconds:,.0f}")
            else:
                cells.append(f"not run: about {steps * seconds_per_step:.0f} s")
            row = " | ".join(cells)
            print(f"| {num_layers} | {num_stages} | {sigma} | {row} |", flush=True)


def fast_calls(num_layers: int, num_stages: int, sigma: float) -> list[Callable[[], Plan]]:
    """The calls that are timed in the first columns."""
    rng = np.random.default_rng(1)
    costs = random_costs(num_layers, sigma, seed=0)
    layer_bytes = rng.integers(10**6, 10**9, num_layers).tolist()
    # The partition that was best before the costs drifted by some 20%.
    before = np.array(costs) * rng.lognormal(0, 0.2, num_layers)
    moving = {"current": optimal(before, num_stages).boundaries, "layer_bytes": layer_bytes}
    cap = 3 * sum(layer_bytes) // num_stages + 2 * 10**9
    memory = StageMemory(layer_bytes, [10**6] * num_layers, 2 * num_stages, cap)
    speeds = rng.choice([0.5, 1.0], num_stages).tolist()
    return [
        lambda: optimal(costs, num_stages),
        lambda: optimal(costs, num_stages, **moving),
        lambda: optimal(costs, num_stages, **moving, memory=memory),
        lambda: optimal(costs, num_stages, **moving, speeds=speeds),
        lambda: diffusion(costs, num_stages, **moving),
    ]


def print_quality(samples: int) -> None:
    """Print how far from the smallest bottleneck the others end."""
    print("\nBottleneck divided by the smallest possible one\n")
    print("| layers | stages | sigma | partitioner | mean | 95% | largest | share above 1 |")
    print("|---|---|---|---|---|---|---|---|")
    others: tuple[Callable[..., Plan], ...] = (balanced, diffusion)
    for sigma in SPREADS:
        for num_layers, num_stages in QUALITY_SIZES:
            for partitioner in others:
                ratios = [
                    ratio(partitioner, random_costs(num_layers, sigma, seed), num_stages)
                    for seed in range(samples)
                ]
                above = sum(value > 1 + 1e-9 for value in ratios) / samples
                print(
                    f"| {num_layers} | {num_stages} | {sigma} | {partitioner.__name__} | "
                    f"{statistics.mean(ratios):.3f} | {np.percentile(ratios, 95):.3f} | "
                    f"{max(ratios):.3f} | {above:.0%} |",
                    flush=True,
                )


def ratio(partitioner: Callable[..., Plan], costs: Sequence[float], num_stages: int) -> float:
    """Bottleneck of a partitioner over that of `optimal`."""
    return partitioner(costs, num_stages).bottleneck / optimal(costs, num_stages).bottleneck


def random_costs(num_layers: int, sigma: float, seed: int) -> list[float]:
    """Log-normal layer costs."""
    costs: list[float] = np.random.default_rng(seed).lognormal(0, sigma, num_layers).tolist()
    return costs


def time_cell(call: Callable[[], Plan], repeats: int) -> str:
    """Median and least milliseconds of a call."""
    seconds = [timed(call) for _ in range(repeats)]
    return f"{1e3 * statistics.median(seconds):.1f} ({1e3 * min(seconds):.1f})"


def timed(call: Callable[[], Plan]) -> float:
    """Seconds of processor time of one call, so that other programs count little."""
    start = time.thread_time()
    call()
    return time.thread_time() - start


if __name__ == "__main__":
    main()
