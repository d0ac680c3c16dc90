"""A training that gets nodes by a second Slurm job and loses them again: ``python -m tests.slurm.elastic FOLDER``.

The first job's tasks train; those of the second one, which ``dynpipe join`` starts, join them.
Rank 0 writes ``FOLDER/losses.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dynpipe_ds.host.install import init_distributed
from tests.distributed.configs import BY_HAND
from tests.distributed.models import Run, data, make_engine

RUN = Run(num_stages=2, num_batches=10)
GROW_AFTER, WARNED_AFTER, STAGES = 2, 5, 3
"""Batches, counted from 0, and the number of stages between them."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for a minute at most."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def main(folder: Path) -> None:
    """Train; grow as soon as the second job's workers wait, shrink when they are warned."""
    torch.set_num_threads(1)
    init_distributed("gloo")
    repack = {"leave_on": "SIGTERM", "release": {"backend": "slurm"}}
    section = {**BY_HAND, "repack": repack, "elastic": {"enabled": True, "door_file": str(folder / "door.json")}}
    engine = make_engine(replace(RUN, config={"dynamic_pipeline": section}))
    node, events, losses = os.environ["SLURMD_NODENAME"], list[Any](), []

    @engine.on_repack
    def tell(event: Any) -> None:
        print(f"{node}: {'leaves' if event.released else 'stays'}: {event}", flush=True)
        events.append(event)

    print(f"{node}: rank {engine.global_rank} of {engine.num_stages} at batch {engine.global_steps}", flush=True)
    batches = data(0, RUN.micro_batches)
    for _ in range(engine.global_steps * RUN.micro_batches):
        next(batches)
    while engine.global_steps < RUN.num_batches:
        batch = engine.global_steps
        if batch == WARNED_AFTER:
            if engine.global_rank == 0:
                (folder / "grown").touch()
                wait_until((folder / "warned").exists)
            torch.distributed.barrier()
        losses.append(float(engine.train_batch(batches)))
        if batch == GROW_AFTER:
            if engine.global_rank == 0:
                (folder / "ready").touch()
            growing = engine.dynamic.repacker.growing
            while not growing.num_waiting():
                time.sleep(0.05)
            engine.repack(STAGES)
    if engine.global_rank == 0:
        told = [(e.batch, len(e.before) - 1, len(e.after) - 1, e.seconds) for e in events]
        (folder / "losses.json").write_text(json.dumps({"losses": losses, "events": told}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
