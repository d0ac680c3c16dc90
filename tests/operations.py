"""Compiles DeepSpeed's operations for CPUs before the tests need them: ``python -m tests.operations``.

Each is compiled by the first process that asks for it, while all others wait for its lock. A test that ends its
processes meanwhile leaves the lock behind, and everything after it would wait for ever.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.accelerator import get_accelerator  # noqa: E402

NEEDED = ("ShareMemCommBuilder", "FusedAdamBuilder", "CPUAdamBuilder")


def main() -> None:
    """Compile what is not compiled yet."""
    if get_accelerator().device_name() != "cpu":
        return
    for name in NEEDED:
        get_accelerator().create_op_builder(name).load(verbose=False)
        print(f"{name.removesuffix('Builder')} is compiled", file=sys.stderr)


if __name__ == "__main__":
    main()
