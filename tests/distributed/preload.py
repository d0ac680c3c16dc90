"""What every rank of the multi-process tests needs, imported and compiled once in the fork server."""

import fcntl
import gc
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: E402, F401 - seconds, on the first ZeRO engine
import torch._dynamo  # noqa: E402, F401 - seconds, on the first optimizer
from deepspeed.accelerator import get_accelerator  # noqa: E402
from torch.utils.cpp_extension import _get_build_directory  # noqa: E402

import dynpipe_ds  # noqa: E402, F401

# DeepSpeed compiles these on first use, which takes minutes, and remembers them per process: ranks forked
# from here have them already and never touch the compiler's lock files, of which a killed rank would leave
# one behind that blocks everybody.
OPS = ("ShareMemCommBuilder", "CPUAdamBuilder")


def load_ops() -> None:
    """Build what is not built yet, one process at a time."""
    for name in OPS:
        builder = get_accelerator().create_op_builder(name)
        folder = Path(_get_build_directory(builder.name, verbose=False))
        with open(folder.parent / f"{builder.name}.dynpipe", "w") as mine:
            fcntl.flock(mine, fcntl.LOCK_EX)
            (folder / "lock").unlink(missing_ok=True)  # nobody builds it now: it is stale
            builder.load(verbose=False)


load_ops()
gc.freeze()  # building a bf16 optimizer collects garbage eight times, 0.8 s with all that is imported here
