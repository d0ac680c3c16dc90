"""What the numbers depend on: the device, its driver and load, versions, and how fast it multiplies and copies."""

from __future__ import annotations

import statistics
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.job import Job
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.timing import in_turns
from benchmarks.record import ended, environment, table

_IDLE_PERCENT = 5
_IDLE_BYTES = 2 * 10**9  # one's own context among them
_QUERY = (
    "driver_version", "memory.total", "memory.used", "utilization.gpu", "clocks.sm", "clocks.max.sm", "power.limit",
    "temperature.gpu", "mig.mode.current",
)


def measure(job: Job) -> dict[str, Any]:
    """Ask torch and the driver; multiply and copy."""
    device = torch.device(job.device)
    found: dict[str, Any] = {
        "environment": ended(environment(looks=1)), "cuda": torch.version.cuda, "triton": _version("triton"),
    }
    if job.device == "cuda":
        found |= _of_cuda(device)
    job.keep(found)
    return found | _speed(device, small=job.small)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _of_cuda(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "device": properties.name, "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count, "memory_bytes": total, "taken_bytes": total - free,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
        **driver(),
    }


def driver() -> dict[str, str]:
    """What the driver says of the first device; what it does not say is left out."""
    try:
        command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        named = dict(zip(_QUERY, (value.strip() for value in answer.strip().splitlines()[0].split(",")), strict=False))
        return {name: value for name, value in named.items() if not value.startswith("[")}
    except (OSError, subprocess.SubprocessError, IndexError):
        path = Path("/proc/driver/nvidia/version")
        return {"driver_version": path.read_text().splitlines()[0]} if path.is_file() else {}


def _speed(device: torch.device, *, small: bool) -> dict[str, Any]:
    """Of a large product in bf16, of a copy on the device, and of copies from and to pinned host memory."""
    side, num_bytes = (64, 2**16) if small else (8192, 2**28)
    a = torch.randn(side, side, device=device, dtype=torch.bfloat16)
    there, other = (torch.empty(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    here = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    actions = (lambda: a @ a, lambda: other.copy_(there), lambda: here.copy_(there), lambda: there.copy_(here))
    seconds = in_turns(actions, device, rounds=10, warm_up=3, until_s=float("inf"))
    product_s, copy_s, out_s, in_s = (statistics.median(found) for found in seconds)
    return {
        "product_side": side, "tflops_bf16": 2 * side**3 / product_s / 1e12, "copy_gb_s": 2 * num_bytes / copy_s / 1e9,
        "to_host_gb_s": num_bytes / out_s / 1e9, "from_host_gb_s": num_bytes / in_s / 1e9,
    }


def text(parts: dict[str, Outcome]) -> str:
    """The table of the report."""
    found = parts["facts"].values
    rows = [[name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value)]
            for name, value in found.items() if value is not None and name != "environment"]  # fmt: skip
    return busy(found) + table(("what", "value"), rows)


def busy(found: dict[str, Any]) -> str:
    """What to say first where others used the device before."""
    used, taken = found.get("utilization.gpu", "0 %"), found.get("taken_bytes", 0)
    if int(used.split()[0]) <= _IDLE_PERCENT and taken <= _IDLE_BYTES:
        return ""
    return f"**The device was busy before:** {used} in use, {taken / 1e9:.1f} GB taken.\n\n"
