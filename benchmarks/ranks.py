"""What the ranks of a benchmark do alike: start, take the time, hand over what they measured."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def start_rank() -> None:
    """Join the process group, with one thread and without DeepSpeed's chatter."""
    from deepspeed.accelerator import get_accelerator

    from dynpipe_ds import init_distributed

    torch.set_num_threads(1)
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with contextlib.redirect_stdout(io.StringIO()):
        init_distributed()


def now_s() -> float:
    """The time at which all ranks are here and their devices idle."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()
    dist.barrier()
    return time.perf_counter()


def leave(folder: Path, name: str, values: dict[str, Any]) -> None:
    """Hand the first rank's values over to the process that started the ranks, and end the process group.

    Args:
        folder: where results go.
        name: of the benchmark; the file's name begins with a dot.
        values: what was measured.
    """
    if dist.get_rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f".{name}.json").write_text(json.dumps(values), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def take(folder: Path, name: str) -> dict[str, Any]:
    """Read and remove what :func:`leave` wrote.

    Args:
        folder: where results go.
        name: of the benchmark.
    """
    path = folder / f".{name}.json"
    values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    return values


def argument_list(options: argparse.Namespace) -> list[str]:
    """Options as the command line that gives them."""
    arguments: list[str] = []
    for name, value in vars(options).items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            arguments.append(flag)
        elif isinstance(value, list):
            arguments += [flag, *map(str, value)] if value else []
        elif value is not None and value is not False:
            arguments += [flag, str(value)]
    return arguments
