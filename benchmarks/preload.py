"""What all ranks of a benchmark import, once, before they are forked."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed  # noqa: E402, F401
import torch._dynamo  # noqa: E402, F401 - seconds, on the first optimizer

import dynpipe_ds  # noqa: E402, F401

gc.freeze()  # a collection would write to, and so copy, what all share
