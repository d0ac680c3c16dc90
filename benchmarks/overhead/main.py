"""All overheads: profiling, planning, the whole section, moving one layer, bytes sent, rebalancing after every batch.

python -m benchmarks.overhead.main [--quick]
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.overhead import every_batch, migration, planning, profiling, section, sent

PARTS: dict[str, Callable[[], None]] = {
    "planning": planning.main, "profiling": profiling.main, "section": section.main, "migration": migration.main,
    "bytes sent": sent.main,
    "every batch": every_batch.main,
}


def main() -> None:
    for name, measure in PARTS.items():  # by one process: their ranks share what is imported
        print(f"\n## {name}\n", flush=True)
        measure()


if __name__ == "__main__":
    main()
