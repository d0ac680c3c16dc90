"""All overheads: profiling, planning, the whole section, moving one layer, rebalancing after every batch.

python -m benchmarks.overhead.main [--quick]
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.overhead import every_batch, migration, planning, profiling, section

PARTS: dict[str, Callable[[], None]] = {
    "planning": planning.main, "profiling": profiling.main, "section": section.main, "migration": migration.main,
    "every batch": every_batch.main,
}


def main() -> None:
    for name, measure in PARTS.items():  # by one process: their ranks share what is imported
        print(f"\n## {name}\n", flush=True)
        measure()


if __name__ == "__main__":
    main()
