"""What placements of experts gain by the performance model, next to Pro-Prophet's tables; nothing is trained.

python -m benchmarks.experts --quick        # few settings
python -m benchmarks.experts                # all three tables
python -m benchmarks.experts paper          # Tables IV and V
python -m benchmarks.experts layers         # 4 to 32 ranks, all models, k, drifts
python -m benchmarks.experts ablation       # Figures 14 and 15
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.experts import tables
from benchmarks.experts.settings import MODELS
from benchmarks.paper.report import Report
from benchmarks.record import RESULTS

TABLES = {
    "paper": (tables.beside_the_paper, "Experts that move, next to Pro-Prophet's Tables IV and V"),
    "layers": (tables.large, "Experts that move: MoE layers on 4 to 32 ranks"),
    "ablation": (tables.ablation, "Experts that move: planner, scheduler, both"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=[*TABLES, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="one layer, two batches, small pools of ranks, two models")
    parser.add_argument("--layers", type=int, default=2, help="drawn of each setting")
    parser.add_argument("--batches", type=int, default=4, help="of each layer")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--processes", type=int, default=2, help="at the same time")
    parser.add_argument("--out", type=Path, default=RESULTS / "experts")
    options = parser.parse_args()
    size = tables.Size(
        options.layers, options.batches, tuple(options.ranks), tuple(MODELS), options.processes
    )  # fmt: skip
    if options.quick:
        size = tables.Size(1, 2, (4, 8), ("S", "M"), 1)
    for name in TABLES if options.table == "all" else [options.table]:
        fill, title = TABLES[name]
        fill(Report(name, options.out, "performance model", options.quick, title), size)


if __name__ == "__main__":
    main()
