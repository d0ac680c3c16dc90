"""Time that a layer saves at the points of its scenario's schedule: forward and backward against the dense layer.

python -m benchmarks.layers.main [--scenario pruning --repeats 15]
"""

from __future__ import annotations

import argparse
import importlib

import torch

from benchmarks.layers.case import measure
from benchmarks.record import ending, environment, in_words
from dynpipe_ds.reporting import format_table

# Modules benchmarks.layers.<name>, each with cases(), which gives its Case objects.
SCENARIOS = ("pruning", "freezing", "early_exit", "moe", "mod", "sparse_attention")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenario", choices=SCENARIOS, help="one alone; all without it")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = environment(threads=1)
    print(in_words(found))
    rows = [["scenario", "amount", "operations", "time (95% interval)", "layer ms", "dense ms"]]
    for name in [options.scenario] if options.scenario else SCENARIOS:
        for case in importlib.import_module(f"benchmarks.layers.{name}").cases():
            layer_s, dense_s, ratio = measure(case, options.repeats)
            rows.append([
                name, case.amount, f"{case.operations():.2f}", ratio.text(unit=""),
                f"{1e3 * layer_s:.1f}", f"{1e3 * dense_s:.1f}",
            ])  # fmt: skip
            print("  ".join(rows[-1]), flush=True)
    print("\nshares of the dense layer's, forward and backward\n" + format_table(rows))
    print(*ending(found), sep="\n", end="")


if __name__ == "__main__":
    main()
