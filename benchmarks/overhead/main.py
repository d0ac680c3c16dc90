"""All overheads: profiling, planning, the whole section, moving one layer, rebalancing after every batch.

python -m benchmarks.overhead.main [--quick]
"""

from __future__ import annotations

import subprocess
import sys

PARTS = ("planning", "profiling", "section", "migration", "every_batch")


def main() -> None:
    for part in PARTS:
        print(f"\n## {part.replace('_', ' ')}\n", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.overhead.{part}", *sys.argv[1:]], check=True)


if __name__ == "__main__":
    main()
