"""What every rank of the multi-process tests needs, imported once in the fork server."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import cpuinfo  # noqa: E402
import pytest  # noqa: E402, F401 - a rank imports its function's file

import benchmarks.preload  # noqa: E402, F401
import tests.distributed.models  # noqa: E402, F401
from dynpipe_ds.migration.names import note_packages  # noqa: E402

note_packages()  # a second, on every engine
PROCESSOR = cpuinfo.get_cpu_info()  # a second, else two on every rank that loads what DeepSpeed compiled
cpuinfo.get_cpu_info = lambda: PROCESSOR
gc.freeze()
