"""A small training run as a step of a Slurm job: ``python -m tests.slurm.train FOLDER``, by ``srun``.

It re-packs to two stages on the way. Before its last batch it waits until the job that was queued for the nodes has
started, so that the order of things can be seen. Rank 0 writes ``FOLDER/losses.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dynpipe_ds.host.install import init_distributed
from tests.distributed.configs import BY_HAND
from tests.distributed.models import Run, make_engine, train

RUN = Run(num_stages=4, num_batches=8)
REPACK_BEFORE, SURVIVORS = 3, 2


def main(folder: Path) -> None:
    """Train and re-pack."""
    torch.set_num_threads(1)
    init_distributed("gloo")
    section = {**BY_HAND, "repack": {"release": {"backend": "slurm"}}}
    run = replace(RUN, config={"dynamic_pipeline": section})
    engine = make_engine(run)
    node, events = os.environ["SLURMD_NODENAME"], list[Any]()

    @engine.on_repack
    def tell(event: Any) -> None:
        print(f"{node}: {'leaves' if event.released else 'stays'}: {event}", flush=True)
        events.append(event)

    def on_batch(engine: Any, batch: int) -> None:
        if batch == REPACK_BEFORE:
            engine.repack(SURVIVORS)
        if batch == RUN.num_batches - 1 and engine.global_rank == 0:
            deadline = time.monotonic() + 60
            while not (folder / "second").exists() and time.monotonic() < deadline:
                time.sleep(0.1)

    losses = train(engine, run, on_batch)
    if engine.global_rank == 0:
        (event,) = events
        report = {"losses": losses, "seconds": event.seconds, "world": torch.distributed.get_world_size()}
        (folder / "losses.json").write_text(json.dumps(report))
    print(f"{node}: has trained {len(losses)} batches", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
