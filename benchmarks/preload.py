"""What all ranks of a benchmark import, once, before they are forked."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import deepspeed.module_inject.auto_ep_layer  # noqa: E402, F401 - on every engine
import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401 - seconds, on the first ZeRO engine
import torch._dynamo  # noqa: E402, F401 - seconds, on the first optimizer
import torch.utils.cpp_extension  # noqa: E402, F401 - and setuptools: 0.3 s, on every engine

import dynpipe_ds  # noqa: E402, F401

gc.freeze()  # a collection would write to, and so copy, what all share; a bf16 optimizer makes eight
