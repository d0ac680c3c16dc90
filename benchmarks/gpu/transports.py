"""By which back-end can two processes that share one device exchange its tensors?"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import staged
from benchmarks.gpu.job import Job
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.timing import Spread, wall_s
from benchmarks.record import table

ORDER = ("nccl", "gloo", staged.NAME)
"""As they are tried; the first one that works is used."""


def measure(job: Job) -> dict[str, Any]:
    """Add up a tensor, send one there and back, and look at what came; then take the time of sends."""
    device = torch.device(job.device)
    staged.start(job.options["backend"], job.rank, job.size, job.port, timeout_s=max(5.0, job.left_s - 2))
    total = torch.full((1000,), float(job.rank + 1), device=device)
    dist.all_reduce(total)
    if not bool(total.eq(sum(range(1, job.size + 1))).all()):
        raise RuntimeError(f"all_reduce gave {total[0].item()}")
    sent = torch.arange(1000, device=device, dtype=torch.float32) + 1000 * job.rank
    got = torch.empty_like(sent)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, got, 1 - job.rank),
                                        dist.P2POp(dist.isend, sent, 1 - job.rank)]):  # fmt: skip
        work.wait()
    if not bool(got.eq(torch.arange(1000, device=device) + 1000 * (1 - job.rank)).all()):
        raise RuntimeError("what was received is not what was sent")
    return {"num_bytes": (num := 2**16 if job.small else 2**27), "send_s": _send_s(job, device, num)}


def _send_s(job: Job, device: torch.device, num_bytes: int, repeats: int = 6) -> list[float]:
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        seconds.append(wall_s(lambda: dist.send(message, 1) if job.rank == 0 else dist.recv(message, 0), device))
    return seconds[1:]


def chosen(parts: Mapping[str, Outcome]) -> str:
    """The first back-end that worked; the staged one if none did, whose error then shows again."""
    return next((name for name in ORDER if name in parts and not parts[name].error), staged.NAME)


def text(parts: dict[str, Outcome]) -> str:
    """The table of the report."""
    rows = []
    for name, outcome in parts.items():
        send_s = outcome.values.get("send_s", [])
        rows.append([
            name, "works" if not outcome.error else f"does not: {' '.join(outcome.error.split())[:300]}",
            Spread.of([outcome.values["num_bytes"] / s / 1e9 for s in send_s]).text() if send_s else "",
        ])
    used = chosen(parts)
    rates = [parts[used].values["num_bytes"] / statistics.median(parts[used].values["send_s"])] if (
        used in parts and parts[used].values) else []
    how = "through pinned host memory and gloo over the loopback" if used == staged.NAME else "by itself"
    return (
        f"Used below: **{used}**, {how}{f', {rates[0] / 1e9:.2f} GB/s' if rates else ''}.\n\n"
        + table(("back-end", "two processes on one device", "one send, GB/s: median (quartiles)"), rows)
    )
