"""A process that ends while a thread of gloo still frees a tensor ends with the exit code of its script."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """\
import os, sys, threading, time, weakref
import torch
import torch.distributed as dist
from dynpipe_ds.ranks.guard import Guard

rank = 0 if os.fork() else 1
if rank == 1:
    sys.stderr = open(os.devnull, "w")
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
if sys.argv[2] == "guarded":
    Guard(lambda: None).start()
begun = threading.Event()

def busy():
    begun.set()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        pass

if rank == 1:
    time.sleep(0.3)
    dist.all_reduce(torch.ones(3))
    os._exit(0)  # only the other one's end is looked at
tensor = torch.ones(3)
weakref.finalize(tensor, busy).atexit = False
dist.all_reduce(tensor, async_op=True)
del tensor  # so that a thread of gloo frees it, as soon as the other rank has come
begun.wait()
print("trained")
sys.exit(3)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="this system does not show a process's threads")
@pytest.mark.parametrize(
    ("kind", "code"), [("guarded", 3), ("bare", -signal.SIGABRT if sys.version_info < (3, 14) else 3)]
)
def test_exit_code(tmp_path: Path, kind: str, code: int) -> None:
    """Without the guard the process aborts before Python 3.14: once torch has mended that, this guard can go."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    surroundings = {**os.environ, "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, str(script), str(tmp_path / "store"), kind]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.endswith("trained\n"), done.stderr
    assert done.returncode == code, done.stderr
