"""A GPT's pipeline of one stage: DeepSpeed's own engine, and ours without and with the section, in turns."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.job import Job
from benchmarks.gpu.models import SMALL, Size, batches, engine, join
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.timing import Spread, allocated_bytes, forget_peak, peak_bytes, wall_s
from benchmarks.record import table

SIZE = Size(depth=12, hidden=1024, heads=16, seq_len=1024, micro_batch=4, num_micro_batches=4)
PLAIN = "DeepSpeed's class"
SECTIONS: dict[str, dict[str, Any] | None] = {PLAIN: None, "ours, no section": None, "ours, as shipped": {}}
_WARM_UP = 12  # rounds: times are steady after 8 profiles
_MOST_ROUNDS = 60
_RESERVE_S = 4.0


def measure(job: Job) -> dict[str, Any]:
    """Wall seconds of every engine's batches, round by round, and its peak memory."""
    join(job)
    device, size = torch.device(job.device), SMALL if job.small else SIZE
    engines, own_bytes = {}, {}
    data = batches(size)
    for name, section in SECTIONS.items():
        before = allocated_bytes(device)
        made = engine(size, num_stages=1, precision="bf16", section=section, is_dynamic=name != PLAIN)
        made.train_batch(data)  # now there is optimizer state
        engines[name], own_bytes[name] = made, allocated_bytes(device) - before
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    peaks = dict.fromkeys(engines, 0)
    names = list(engines)
    warm_up = job.at_most(_WARM_UP)
    for number in range(warm_up + job.at_most(_MOST_ROUNDS)):
        if number > warm_up + 2 and time.time() > job.until_s - _RESERVE_S:
            break
        order = names[number % 3 :] + names[: number % 3]
        for name in order if number % 2 == 0 else reversed(order):
            forget_peak(device)
            before = allocated_bytes(device)
            took_s = wall_s(lambda name=name: engines[name].train_batch(data), device)
            if number >= warm_up:
                seconds[name].append(took_s)
                peaks[name] = max(peaks[name], own_bytes[name] + peak_bytes(device) - before)
    tokens = size.num_micro_batches * size.micro_batch * size.seq_len
    shipped = engines["ours, as shipped"].overhead
    return {
        "size": str(size), "seconds": seconds, "peak_bytes": peaks, "tokens": tokens,
        "overhead_s": {"profiling": shipped.profiling_s, "planning": shipped.planning_s},
    }


def text(parts: dict[str, Outcome]) -> str:
    """The table of the report."""
    found = parts["engines"].values
    plain, rows = found["seconds"][PLAIN], []
    for name, seconds in found["seconds"].items():
        ratios = [100 * (ours / theirs - 1) for ours, theirs in zip(seconds, plain, strict=True)]
        rows.append([
            name, Spread.of(seconds).text(1e3, ".2f"), f"{found['tokens'] / statistics.median(seconds):.0f}",
            "" if name == PLAIN else Spread.of(ratios).text(form="+.2f"), f"{found['peak_bytes'][name] / 1e6:.0f}",
        ])
    head = ("engine", "batch, ms", "tokens/s", "over DeepSpeed's, round by round, %", "peak memory, MB")
    return f"GPT in bf16, {found['size']}; {len(plain)} rounds; medians (quartiles).\n\n{table(head, rows)}"
