"""What the ranks of a benchmark do alike: start, take the time, hand over what they measured."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.forked import run_forked

Send = Callable[[Any], None]
"""Hands a value of the first rank over to the process that started the ranks; what other ranks give it is dropped."""


def on_ranks(num_ranks: int, function: Callable[..., None], *args: Any) -> Iterator[Any]:
    """Call ``function(send, *args)`` on some ranks of one process group.

    Args:
        num_ranks: how many.
        function: importable by name.
        *args: picklable arguments.

    Yields:
        What the first rank sends, as it comes.

    Raises:
        RankError: if a rank fails.
    """
    yield from run_forked(_in_a_group, num_ranks, function, args)


def _in_a_group(send: Send, function: Callable[..., None], args: Any) -> None:
    start_rank()
    function(send, *args)
    dist.barrier()
    dist.destroy_process_group()


def start_rank() -> None:
    """Join the process group, with one thread."""
    from deepspeed.accelerator import get_accelerator

    from dynpipe_ds import init_distributed

    torch.set_num_threads(1)
    if get_accelerator().device_name() != "cpu":
        get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    init_distributed()


def now_s() -> float:
    """The time at which all ranks are here and their devices idle."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()
    dist.barrier()
    return time.perf_counter()
