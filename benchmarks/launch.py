"""Run a benchmark's ranks under the real launcher and print its environment."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import deepspeed
import torch

from scenarios.launch import free_port


def environment() -> str:
    """One line with what the numbers depend on."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return (
        f"{cpu}, {os.cpu_count()} cores; Python {platform.python_version()}, torch {torch.__version__}, "
        f"DeepSpeed {deepspeed.__version__}"
    )


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


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
