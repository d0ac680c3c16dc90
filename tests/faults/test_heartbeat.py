"""The thread that gives signs of life leaves a process that ends in peace."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import time
import torch.distributed as dist
from dynpipe_ds.heartbeat import Heartbeat
store = dist.TCPStore("127.0.0.1", 0, 1, True)
heartbeat = Heartbeat(store.clone(), 0, 1, interval_s=1e-5)
time.sleep(0.02)
"""


def test_a_process_ends_cleanly_while_its_thread_is_inside_the_store() -> None:
    for _ in range(2):  # without stopping the thread at exit, two of three runs abort
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
