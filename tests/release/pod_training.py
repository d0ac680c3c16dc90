"""What the pods of ``test_pods_return`` train, as ``train.py`` in the folder that all of them share.

Twice it waits for a worker and grows to three stages. In between a pod goes: the test sees ``grown``, and sends what
the pod gets. Each process writes ``<its pod>.json`` when the training ends, and one that leaves when it leaves.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dynpipe_ds.host.install import init_distributed
from tests.distributed.models import Run, data, make_engine

RUN = Run(num_stages=2, num_batches=10, dropout=0.1)
GROW_AFTER, GOES_IN, STAGES = (2, 6), 4, 3
"""Batches, counted from 0: after which the job grows, and in which a pod goes; number of stages in between."""


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait for three minutes at most."""
    deadline = time.monotonic() + 180
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def main() -> None:
    """Train as the folder's JSON says."""
    torch.set_num_threads(1)
    init_distributed("gloo")
    engine = make_engine(replace(RUN, config=json.loads(Path("ds_config.json").read_text())))
    pod, losses, events, first = os.environ["HOSTNAME"], list[float](), list[Any](), engine.global_steps

    def write() -> None:
        told = [(e.batch, len(e.before) - 1, len(e.after) - 1) for e in events]
        seen = {"first": first, "losses": losses, "events": told, "pid": os.getpid()}
        Path(f"{pod}.json").write_text(json.dumps(seen))

    @engine.on_repack
    def tell(event: Any) -> None:
        events.append(event)
        if event.released:
            write()

    batches = data(0, RUN.micro_batches)
    for _ in range(first * RUN.micro_batches):
        next(batches)
    while engine.global_steps < RUN.num_batches:
        batch = engine.global_steps
        if batch == GOES_IN:
            Path(f"grown-{pod}").touch()
            wait_until(Path("gone").exists)
        losses.append(float(engine.train_batch(batches)))
        if batch in GROW_AFTER and engine.num_stages < STAGES:
            wait_until(lambda: engine.num_waiting() > 0)
            engine.repack(STAGES)
    write()
    engine.destroy()


if __name__ == "__main__":
    main()
