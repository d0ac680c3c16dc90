"""Record layer times of a real model, half of which freezes, for tests/decide/test_intervals.py.

    OMP_NUM_THREADS=1 python tests/data/record_freezing.py tests/data/recorded_freezing.json

Two processes stand for two stages, four transformer layers each, side by side and in step batch
by batch, without a pipeline between them. From batch 40 on the first stage's layers are frozen:
no backward. Times are means over the micro-batches of a batch, in seconds.
"""

from __future__ import annotations

import json
import multiprocessing
import platform
import sys
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from torch import nn

NUM_BATCHES, FREEZE_AT, NUM_MICRO_BATCHES = 70, 40, 4
LAYERS_PER_STAGE, WIDTH, SHAPE = 4, 192, (4, 64)


def micro_batch_s(layers: nn.ModuleList, frozen: bool) -> list[tuple[float, float]]:
    """Forward and backward seconds of every layer for one micro-batch."""
    x = torch.randn(*SHAPE, WIDTH)
    graphs, forward_s, backward_s = [], [], [0.0] * len(layers)
    for layer in layers:
        x = x.detach().requires_grad_(not frozen)
        start = time.perf_counter()
        with torch.set_grad_enabled(not frozen):
            y = layer(x)
        forward_s.append(time.perf_counter() - start)
        graphs.append((x, y))
        x = y
    gradient = torch.ones_like(x)
    for index in () if frozen else reversed(range(len(layers))):
        x, y = graphs[index]
        start = time.perf_counter()
        y.backward(gradient)
        backward_s[index] = time.perf_counter() - start
        assert x.grad is not None
        gradient = x.grad
    return list(zip(forward_s, backward_s, strict=True))


def run_stage(
    stage: int, barrier: Barrier, results: multiprocessing.SimpleQueue[tuple[int, list]]
) -> None:
    """Measure one stage's layers in every batch."""
    torch.set_num_threads(1)
    torch.manual_seed(stage)
    layers = nn.ModuleList(
        nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        for _ in range(LAYERS_PER_STAGE)
    )
    batches = []
    for batch in range(NUM_BATCHES):
        barrier.wait()
        frozen = stage == 0 and batch >= FREEZE_AT
        micro_batches = [micro_batch_s(layers, frozen) for _ in range(NUM_MICRO_BATCHES)]
        means = torch.tensor(micro_batches, dtype=torch.float64).mean(dim=0)
        batches.append([[round(seconds, 7) for seconds in layer] for layer in means.tolist()])
    results.put((stage, batches))


def main() -> None:
    """Run both stages and write the file named on the command line."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.SimpleQueue()
    workers = [context.Process(target=run_stage, args=(s, barrier, results)) for s in (0, 1)]
    for worker in workers:
        worker.start()
    by_stage = dict(results.get() for _ in workers)
    for worker in workers:
        worker.join()
    head = {
        "recorded_by": "tests/data/record_freezing.py",
        "environment": f"torch {torch.__version__}, Python {platform.python_version()}, CPU",
        "freeze_at": FREEZE_AT,
        "num_micro_batches": NUM_MICRO_BATCHES,
        "boundaries": [0, LAYERS_PER_STAGE, 2 * LAYERS_PER_STAGE],
    }
    rows = [by_stage[0][b] + by_stage[1][b] for b in range(NUM_BATCHES)]
    lines = ",\n".join(json.dumps(row) for row in rows)
    text = json.dumps(head, indent=1)[:-2] + f',\n "forward_backward_s": [\n{lines}\n]\n}}\n'
    Path(sys.argv[1]).write_text(text)


if __name__ == "__main__":
    main()
