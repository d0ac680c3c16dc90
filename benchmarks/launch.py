"""Run a benchmark's ranks under the real launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scenarios.launch import free_port


def launch(module: str, num_ranks: int, *args: str) -> None:
    """Start ``module`` on some ranks of this machine with DeepSpeed's launcher and wait for it.

    Args:
        module: module to run, which must see ``RANK`` in its environment to know that it is a rank.
        num_ranks: how many.
        *args: its arguments.
    """
    launcher = Path(sys.executable).with_name("deepspeed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [
        str(launcher), "--no_local_rank", "--num_accelerators", str(num_ranks), "--master_port", str(free_port()),
        "--log_level", "error", "--module", module, *args,
    ]
    subprocess.run(command, check=True, env=environment)
