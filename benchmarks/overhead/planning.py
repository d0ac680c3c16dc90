"""How long planning takes, by layers and stages, beside DeepSpeed's ``partition_balanced``.

python -m benchmarks.overhead.planning [--quick]
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from benchmarks.planner.main import SIZES, fast_calls, random_costs, timed
from benchmarks.record import COLOURS, RESULTS, add_force, environment, force, new_figure, save, save_figure, table
from dynpipe_ds.partition import balanced, simulated

NAME = "planning"
MORE_SIZES = ((12, 2), (24, 4), (48, 8), *SIZES)
PLANNERS = {"optimal": 0, "optimal, with current": 1, "diffusion": 4}  # places in fast_calls()
BALANCED, SIMULATED = "balanced (DeepSpeed)", "simulated"
SPREAD = 1.0  # sigma of the log-normal costs
MOST_SIMULATED = 200  # layers; one search simulates for about a second at most


def measure(sizes: list[tuple[int, int]], repeats: int, budget_s: float) -> list[dict[str, Any]]:
    """Median processor seconds of every planner, by size; ``None`` where it would take too long."""
    balanced([1.0, 1.0], 2)  # loads DeepSpeed, which takes seconds the first time
    rows: list[dict[str, Any]] = []
    s_per_step = 0.0
    for num_layers, num_stages in sizes:
        calls = fast_calls(num_layers, num_stages, SPREAD)
        seconds: dict[str, float | None] = {
            name: statistics.median(timed(calls[place]) for _ in range(repeats)) for name, place in PLANNERS.items()
        }
        costs, steps = random_costs(num_layers, SPREAD, seed=0), num_layers**2 * num_stages
        seconds[SIMULATED] = seconds[BALANCED] = None
        if num_layers <= MOST_SIMULATED:
            seconds[SIMULATED] = timed(lambda c=costs, s=num_stages: simulated(c, s))
        if steps * s_per_step < budget_s:
            seconds[BALANCED] = took_s = timed(lambda c=costs, s=num_stages: balanced(c, s))
            s_per_step = took_s / steps
        rows.append({"layers": num_layers, "stages": num_stages, "seconds": seconds})
    return rows


def report(values: dict[str, Any], folder: Path) -> None:
    """Write the table and the picture."""
    names = [*PLANNERS, SIMULATED, BALANCED]
    rows = [
        [str(row["layers"]), str(row["stages"]), *(_cell(row["seconds"][name]) for name in names)]
        for row in values["rows"]
    ]
    words = "Milliseconds of processor time, medians; log-normal costs (sigma 1)"
    path = save(folder, NAME, values, f"{words}\n\n{table(('layers', 'stages', *names), rows)}")
    figure = new_figure(7, 4)
    axes = figure.subplots()
    for number, name in enumerate(names):
        points = [
            (row["layers"] * row["stages"], 1e3 * row["seconds"][name])
            for row in values["rows"] if row["seconds"][name] is not None
        ]
        axes.plot(*zip(*points, strict=True), "osD^v"[number] + "-", color=COLOURS[number], label=name)
    axes.set(xscale="log", yscale="log", xlabel="layers x stages", ylabel="planning (ms of processor time)")
    axes.set_title("Time to choose a partition")
    axes.legend(frameon=False, fontsize=8)
    save_figure(figure, path)


def _cell(seconds: float | None) -> str:
    return "not run" if seconds is None else f"{1e3 * seconds:,.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="DeepSpeed's only where it takes less than 0.5 s")
    parser.add_argument("--out", type=Path, default=RESULTS / "overhead")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    values: dict[str, Any] = {"environment": environment(threads=1)}
    budget_s = 0.5 if options.quick else 60.0
    values["rows"] = measure(list(MORE_SIZES), 5 if options.quick else 20, budget_s)
    report(values, options.out)


if __name__ == "__main__":
    main()
