"""Make the pictures and tables of docs/schedules.md, in simulated time.

python docs/schedules.py            rewrite both
python docs/schedules.py --check    say whether the tables are up to date (exit code 1 if not)
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from dynpipe_ds.planning import plan_order
from dynpipe_ds.reporting import save_gantt
from dynpipe_ds.schedule import Order, order_of
from dynpipe_ds.simulation import Simulation, Workload, simulate

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER / "schedules.md"
S, M = 4, 8  # stages and micro-batches of the pictures
LAYERS_S = [0.4, 1.0, 1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 1.0, 0.8]  # forwards; backwards take twice as long
CUT = (0, 3, 6, 9, 12)


def equal_stages(num_micro_batches: int = M, *, weight_share: float = 0.5, link_s: float = 0.0) -> Workload:
    """Forwards of 1 ms, backwards of 2 ms, of which a share are gradients of weights."""
    return Workload(
        [1e-3] * S, [2e-3] * S, num_micro_batches, weight_s=[2e-3 * weight_share] * S, activation_bytes=[100] * S,
        activation_link_s=link_s, gradient_link_s=link_s,
    )


def unequal_stages() -> Workload:
    """Twelve layers on four stages, with messages that take a tenth of a layer."""
    forward_s = [1e-3 * sum(LAYERS_S[a:b]) for a, b in pairwise(CUT)]
    return Workload(
        forward_s, [2 * s for s in forward_s], M, weight_s=forward_s, activation_bytes=[100] * S,
        activation_link_s=1e-4, gradient_link_s=1e-4,
    )


def planned(workload: Workload, *, budget: float = 1.0) -> Order:
    """The order that is planned in so many times the memory of 1F1B's fullest worker."""
    most = max(stage.peak_activation_bytes for stage in simulate(workload).stages)
    return plan_order(workload, int(budget * most)).order


def pictures() -> dict[str, dict[str, Simulation]]:
    """Simulated batches by the name of the file, and by name in it."""
    equal, unequal = equal_stages(), unequal_stages()

    def run(workload: Workload, orders: Mapping[str, Order]) -> dict[str, Simulation]:
        return {name: simulate(workload, order, timeline=True) for name, order in orders.items()}

    usual = {"1F1B": order_of("1f1b", M, S)}
    return {
        "schedules_equal.png": run(equal, {**usual, "planned": planned(equal)}),
        "schedules_unequal.png": run(unequal, {**usual, "planned": planned(unequal)}),
    }


def tables() -> dict[str, list[list[str]]]:
    """Tables by name, heads first."""
    counts = (2, 4, 8, 16, 32, 64)
    usual = [simulate(equal_stages(count)) for count in counts]
    new = [simulate(equal_stages(count), planned(equal_stages(count))) for count in counts]
    shares, budgets = (0.0, 0.125, 0.25, 0.375, 0.5), (0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
    by_share = [equal_stages(weight_share=share) for share in shares]
    slow = equal_stages(link_s=2e-4)
    by_budget = [simulate(slow, planned(slow, budget=budget)) for budget in budgets]
    return {
        "micro-batches": [
            ["micro-batches M", *map(str, counts)],
            ["bubble, 1F1B", *(f"{one.bubble_ratio:.1%}" for one in usual)],
            ["bubble, planned", *(f"{one.bubble_ratio:.1%}" for one in new)],
            ["speedup", *(_speedup(a, b) for a, b in zip(usual, new, strict=True))],
        ],
        "share of W": [
            ["of a backward W is", *(f"{share:.1%}" for share in shares)],
            ["speedup", *(_speedup(simulate(work), simulate(work, planned(work))) for work in by_share)],
        ],
        "memory": [
            ["`activation_budget`", *(f"{budget:g}" for budget in budgets)],
            ["bubble", *(f"{one.bubble_ratio:.1%}" for one in by_budget)],
            ["speedup", *(_speedup(simulate(slow), one) for one in by_budget)],
        ],
    }  # fmt: skip


def _speedup(usual: Simulation, new: Simulation) -> str:
    return f"{usual.makespan_s / new.makespan_s:.2f}"


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" * len(rows[0]) + "|", *body])


def page() -> str:
    """The page with its tables as they should be."""
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in tables().items():
        begin, end = f"<!-- {name}: begin -->\n", f"\n<!-- {name}: end -->"
        pattern = re.escape(begin) + ".*?" + re.escape(end)
        new = begin + as_markdown(rows) + end
        text, count = re.subn(pattern, new, text, flags=re.DOTALL)
        assert count == 1, f"docs/schedules.md has no place for the table {name!r}"
    return text


def main() -> int:
    """Rewrite or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    if parser.parse_args().check:
        return int(page() != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page(), encoding="utf-8")
    for file, found in pictures().items():
        save_gantt(FOLDER / "images" / file, {name: simulation.timeline for name, simulation in found.items()})
        print(f"written: {FOLDER / 'images' / file}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
