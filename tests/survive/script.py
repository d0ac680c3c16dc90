"""A user's script with two replicas of two stages, of which one rank is killed; what ranks and spares run.

Arguments: the rank that is killed, or -1; the folder into which each process writes what it saw.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from dynpipe_ds.host.install import init_distributed
from tests.distributed.configs import ADAMW, BY_HAND, ZERO
from tests.distributed.models import Run, data, digest, make_engine

BATCHES, KILLED_AT = 9, 3
SURVIVE = {"enabled": True, "snapshot_every": 1}
RUN = Run(
    2, first=(0, 3, 8), dropout=0.1, config={**ADAMW, **ZERO, "dynamic_pipeline": {**BY_HAND, "survive": SURVIVE}}
)


def main() -> None:
    victim, folder = int(sys.argv[1]), Path(sys.argv[2])
    init_distributed("gloo")
    torch.manual_seed(1234)
    engine = make_engine(RUN)
    began_as, joined = int(os.environ["RANK"]), engine.global_steps > 0
    batches = data(engine.grid.get_data_parallel_id(), RUN.micro_batches)
    for _ in range(engine.global_steps * RUN.micro_batches):
        next(batches)
    losses = {}
    while engine.global_steps < BATCHES:
        batch = engine.global_steps
        if batch == KILLED_AT and began_as == victim and not joined:
            os.kill(os.getpid(), signal.SIGKILL)
        losses[batch] = float(engine.train_batch(batches))
        until = time.monotonic() + 200
        while engine.num_stages == 1 and batch == KILLED_AT + 1 and time.monotonic() < until:
            if engine.num_waiting() >= 2:
                break
            time.sleep(0.2)
    seen = {"losses": losses, "state": digest(engine), "num_stages": engine.num_stages, "joined": joined}
    (folder / f"{os.getpid()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
