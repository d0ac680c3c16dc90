"""Whether this machine has a CUDA device, and whether torch sees it; ``python -m benchmarks.gpu.look`` needs no torch.

Exit code 0 if there is one, 2 if not, with one line that says what to do.
"""

from __future__ import annotations

import ctypes
import sys

REHEARSE = "rehearse on the CPU: DEVICE=cpu make gpu"


def num_devices() -> int:
    """CUDA devices that the driver shows to this process; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def why_not() -> str:
    """The one line to print where there is no device; empty if there is one."""
    if num_devices():
        return ""
    return (
        "make gpu: no CUDA device here (the driver shows none); run it on a machine that has one "
        f"(nvidia-smi lists it; CUDA_VISIBLE_DEVICES may hide it), or {REHEARSE}"
    )


def why_not_torch() -> str:
    """The same for torch, which may be a build without CUDA."""
    import torch

    if torch.cuda.is_available():
        return ""
    build = f"torch {torch.__version__}, built {f'for CUDA {torch.version.cuda}' if torch.version.cuda else 'for CPUs'}"
    return (
        f"make gpu: no CUDA device for {build}; install a torch for this machine's driver "
        f"(make gpu WHEELS=<folder made by make wheels>), or {REHEARSE}"
    )


if __name__ == "__main__":
    if line := why_not():
        sys.exit(print(line, file=sys.stderr) or 2)
