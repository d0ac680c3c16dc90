"""Profiling by events on the device's stream: batches with it and without, in turns."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.job import Job
from benchmarks.gpu.models import SMALL, Size, batches, engine, join
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.timing import Spread, forget_peak, peak_bytes, wall_s
from benchmarks.record import table

SIZES = {
    "large layers": Size(depth=12, hidden=2048, heads=16, seq_len=1024, micro_batch=4, num_micro_batches=4),
    "small layers": Size(depth=12, hidden=512, heads=8, seq_len=256, micro_batch=2, num_micro_batches=8),
}
_WARM_UP = 6
_MOST_PAIRS = 60
_RESERVE_S = 5.0


def measure(job: Job) -> dict[str, Any]:
    """Wall seconds of batches with profiling and without, for each size."""
    join(job)
    found: dict[str, Any] = {}
    for number, (name, size) in enumerate(SIZES.items()):
        size = SMALL if job.small else size
        share_s = (job.left_s - _RESERVE_S) / (len(SIZES) - number)
        found[name] = _of(size, torch.device(job.device), time.time() + share_s, job.at_most(_MOST_PAIRS))
        job.keep(found)
    return found


def _of(size: Size, device: torch.device, until_s: float, most_pairs: int) -> dict[str, Any]:
    made = engine(size, num_stages=1, precision="bf16", section={"rebalance_every": "never", "profile_every": 1})
    data = batches(size)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    peaks: dict[bool, int] = {True: 0, False: 0}
    before_s = 0.0
    for number in range(_WARM_UP + 2 * most_pairs):
        if number == _WARM_UP:
            before_s = made.overhead.profiling_s
        if number > _WARM_UP + 8 and number % 4 == _WARM_UP % 4 and time.time() > until_s:
            break
        made.profiling = number % 4 in (0, 3)  # on, off, off, on: a drift hurts both alike
        forget_peak(device)
        took_s = wall_s(lambda: made.train_batch(data), device)
        if number >= _WARM_UP:
            seconds[made.profiling].append(took_s)
            peaks[made.profiling] = max(peaks[made.profiling], peak_bytes(device))
    layers = made.profile.layers
    return {
        "size": str(size), "with_s": seconds[True], "without_s": seconds[False],
        "accounted_s": made.overhead.profiling_s - before_s, "peak_with_bytes": peaks[True],
        "peak_without_bytes": peaks[False], "layer_forward_s": [layer.forward_s for layer in layers],
        "layer_backward_s": [layer.backward_s for layer in layers], "num_micro_batches": size.num_micro_batches,
    }


def text(parts: dict[str, Outcome]) -> str:
    """The table of the report."""
    rows = []
    for name, row in parts["profiling"].values.items():
        pairs = [100 * (a / b - 1) for a, b in zip(row["with_s"], row["without_s"], strict=True)]
        events_s = row["num_micro_batches"] * (sum(row["layer_forward_s"]) + sum(row["layer_backward_s"]))
        rows.append([
            f"{name}: {row['size']}", Spread.of(row["without_s"]).text(1e3, ".2f"),
            Spread.of(row["with_s"]).text(1e3, ".2f"),
            Spread.of(pairs).text(form="+.2f"), f"{100 * row['accounted_s'] / sum(row['with_s']):.2f}",
            f"{100 * events_s / statistics.median(row['with_s']):.0f}",
            f"{row['peak_with_bytes'] / 1e6:.0f} / {row['peak_without_bytes'] / 1e6:.0f}",
        ])
    head = (
        "GPT, bf16, one stage", "batch without, ms", "with, ms", "difference of pairs, %", "own accounting, %",
        "layers' events, % of the batch", "peak with / without, MB",
    )
    return "Medians (quartiles).\n\n" + table(head, rows)
