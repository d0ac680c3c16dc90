"""Packing and moving a block with its AdamW state between two processes that share the device.

Process 0 gives a block to process 1 and gets it back, again and again, with a batch in between. In turns with it, as
many bytes travel by one ``send`` and one ``recv`` of the same back-end between buffers that exist already; what a move
takes beyond that is packing, votes, and taking the layer in.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.job import Job
from benchmarks.gpu.models import SMALL, Size, batches, engine, join
from benchmarks.gpu.processes import Outcome
from benchmarks.gpu.timing import Spread, allocated_bytes, forget_peak, peak_bytes, wall_s
from benchmarks.record import table

HIDDEN = (512, 1024, 2048)
_WARM_UP = 2  # one move in each direction
_MOST_MOVES = 12
_RESERVE_S = 4.0


def measure(job: Job) -> dict[str, Any]:
    """Seconds of moves, for every precision and size until time is up."""
    join(job)
    found: dict[str, Any] = {"rows": []}
    cases = [(precision, hidden) for hidden in (HIDDEN[:1] if job.small else HIDDEN) for precision in ("fp32", "bf16")]
    for number, (precision, hidden) in enumerate(cases):
        share_s = (job.left_s - _RESERVE_S) / (len(cases) - number)
        size = SMALL if job.small else Size(4, hidden, 8, seq_len=64, micro_batch=1, num_micro_batches=2)
        found["rows"].append(_of(
            size, precision, torch.device(job.device), time.time() + share_s, job.at_most(_MOST_MOVES)
        ))
        job.keep(found)
    return found


def _of(size: Size, precision: str, device: torch.device, until_s: float, most_moves: int) -> dict[str, Any]:
    made = engine(size, num_stages=2, precision=precision, section={"rebalance_every": "never"})
    data = batches(size)
    start = made.partition
    without = (start[0], start[1] - 1, start[2])
    made.train_batch(data)
    row: dict[str, Any] = {
        "precision": precision, "hidden": size.hidden, "move_s": [], "plain_s": [], "bytes_moved": 0,
        "layer_bytes": made.profile.layers[start[1] - 1].parameter_bytes,
    }
    peaks: list[int] = []
    for number in range(_WARM_UP + most_moves):
        if number > _WARM_UP + 1 and _is_late(until_s, device):
            break
        source = number % 2
        event: list[Any] = []
        forget_peak(device)
        before = allocated_bytes(device)
        took_s = _together(lambda e=event, to=start if source else without: e.append(made.repartition(to)), device)
        peaks.append(peak_bytes(device) - before)
        row["bytes_moved"] = event[0].bytes_moved
        message = torch.zeros(row["bytes_moved"], dtype=torch.uint8, device=device)
        plain_s = _together(
            lambda m=message, s=source: dist.send(m, 1 - s) if dist.get_rank() == s else dist.recv(m, s), device
        )
        del message
        if number >= _WARM_UP:
            row["move_s"].append(took_s)
            row["plain_s"].append(plain_s)
        made.train_batch(data)
    # One process gives, one takes: the larger of both is the one's that took.
    worst: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(worst, max(peaks))
    made.destroy()
    return row | {"peak_bytes": max(worst)}


def _together(action: Any, device: torch.device) -> float:
    """Wall seconds until both processes are done."""
    dist.barrier()

    def run() -> None:
        action()
        dist.barrier()

    return wall_s(run, device)


def _is_late(until_s: float, device: torch.device) -> bool:
    """Whether time is up for either process."""
    late = torch.tensor([int(time.time() > until_s)], device=device)
    dist.all_reduce(late)
    return bool(late.item())


def text(parts: dict[str, Outcome]) -> str:
    """The table of the report."""
    rows = []
    for row in parts["moving"].values["rows"]:
        if not row["move_s"]:
            continue
        rate = Spread.of([row["bytes_moved"] / s / 1e9 for s in row["move_s"]])
        share = Spread.of([100 * plain / move for plain, move in zip(row["plain_s"], row["move_s"], strict=True)])
        rows.append([
            row["precision"], str(row["hidden"]), f"{row['layer_bytes'] / 1e6:.1f}", f"{row['bytes_moved'] / 1e6:.1f}",
            Spread.of(row["move_s"]).text(1e3, ".1f"), rate.text(), Spread.of(row["plain_s"]).text(1e3, ".1f"),
            share.text(form=".0f"), f"{row['peak_bytes'] / 1e6:.0f}",
        ])
    head = (
        "precision", "hidden", "layer, MB", "moved with AdamW state, MB", "a move, ms", "GB/s",
        "plain send of as many, ms", "of the plain rate, %", "most memory beside what was there, MB",
    )
    return "One block of the GPT; medians (quartiles).\n\n" + table(head, rows)
