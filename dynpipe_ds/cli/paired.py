"""Being one of two processes that ``pair.py`` started."""

from __future__ import annotations

import os
import sys
import threading

import torch

from dynpipe_ds.host.install import init_distributed


def join() -> int:
    """Be one of the processes that :func:`~dynpipe_ds.cli.pair.start` started, with one thread; returns its rank."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    init_distributed("gloo")
    return torch.distributed.get_rank()


def _end_with_parent() -> None:
    sys.stdin.read()  # its other end is the parent's, and closes with it
    os._exit(1)
