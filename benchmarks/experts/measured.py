"""What placements of experts gain, and what sharding saves, measured on ranks of this machine.

python -m benchmarks.experts.measured waiting     # speed: experts wait, everything that travels is real
python -m benchmarks.experts.measured predicted   # the performance model against measured seconds
python -m benchmarks.experts.measured memory      # bytes of a rank, sharded and replicated
python -m benchmarks.experts.measured --quick     # all of them, short
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.experts import memory, predicted, replayed
from benchmarks.experts.settings import KEPT
from benchmarks.experts.waiting import Sizes
from benchmarks.record import RESULTS, add_force, environment, force, save
from scenarios.moe.placing import Constants

Result = tuple[dict[str, Any], str]


def waiting(sizes: Sizes, options: argparse.Namespace) -> Result:
    """Speed of placements."""
    short = {"batches": 2, "repeats": 1, "drifts": ("slow",)}
    usual = {"batches": options.batches, "drifts": tuple(options.drifts), "top_k": options.top_k}
    found = []
    for setting, constants, measured in replayed.measure(sizes, **(short if options.quick else usual)):
        found.append((setting, constants, measured))
        print(f"drift {setting.drift}: measured", flush=True)
    return replayed.report(sizes, found)


def predictions(sizes: Sizes, options: argparse.Namespace) -> Result:
    """The performance model."""
    sizes = replace(sizes, rows=sizes.rows * sizes.micro_batches)
    short: dict[str, Any] = {"top_k": (1,), "draws": 1, "repeats": 2}
    constants, *rows = predicted.measure(sizes, **(short if options.quick else {}))
    assert isinstance(constants, Constants)
    return predicted.report(sizes, constants, [row for row in rows if isinstance(row, predicted.Row)])


def bytes_of_ranks(sizes: Sizes, options: argparse.Namespace) -> Result:
    """Memory."""
    return memory.report(list(memory.measure(quick=options.quick)))


TABLES: dict[str, Callable[[Sizes, argparse.Namespace], Result]] = {
    "waiting": waiting, "predicted": predictions, "memory": bytes_of_ranks,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", nargs="?", choices=[*TABLES, "all"], default="all")
    parser.add_argument("--quick", action="store_true", help="short waits, few batches, one drift")
    parser.add_argument("--row-us", type=float, help="wait of a row in the forward of an expert; default 80")
    parser.add_argument("--rest-ms", type=float, help="wait of the rest of a block in its forward; default 20")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--batches", type=int, default=12, help="of each placement and drift")
    parser.add_argument("--top-k", type=int, choices=(1, 2), default=1)
    parser.add_argument("--drifts", nargs="+", choices=[*KEPT], default=[*KEPT])
    parser.add_argument("--out", type=Path, default=RESULTS / "experts")
    add_force(parser)
    options = parser.parse_args()
    force(options)
    row_us, rest_ms = (20, 5) if options.quick else (80, 20)
    sizes = Sizes(
        hidden=options.hidden, width=2 * options.hidden, row_s=1e-6 * (options.row_us or row_us),
        rest_s=1e-3 * (options.rest_ms or rest_ms),
    )  # fmt: skip
    for name in TABLES if options.table == "all" else [options.table]:
        machine = environment(4)
        values, text = TABLES[name](sizes, options)
        save(options.out, f"{name}_quick" if options.quick else name, {"environment": machine, **values}, text)


if __name__ == "__main__":
    main()
