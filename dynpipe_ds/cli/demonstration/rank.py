"""One of the two processes: ``python -m dynpipe_ds.cli.demonstration.rank FOLDER`` trains both ways, in turns.

In turns, so that a machine that slows down hurts both alike.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dynpipe_ds import DynamicPipelineEngine, DynamicPipelineModule, RebalanceEvent
from dynpipe_ds.cli import pair, paired
from dynpipe_ds.cli.demonstration import model
from dynpipe_ds.cli.demonstration.course import (
    DYNAMIC,
    EVENTS,
    FREEZE_AT,
    NUM_BATCHES,
    NUM_FROZEN,
    NUM_LAYERS,
    PICTURE,
    RUNS,
    WINDOW,
)  # fmt: skip
from dynpipe_ds.host.specs import LayerSpec
from dynpipe_ds.host.start import initialize
from dynpipe_ds.reporting import save_gantt


class Diary:
    """What the command is told while both train: a line of JSON for each event, written by the first rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / EVENTS).open("a", encoding="utf-8") if rank == 0 else None
        self._progress = pair.progress_file(folder, rank)

    def say(self, kind: str, **values: Any) -> None:
        """Write an event, with plain values."""
        if self._file is not None:
            print(json.dumps({"kind": kind, **values}), file=self._file, flush=True)

    def at(self, what: str) -> None:
        """Say what this rank is at, for whoever looks whether it gets on."""
        self._progress.write_text(what, encoding="utf-8")


class Run:
    """One of the two trainings."""

    def __init__(self, name: str, diary: Diary) -> None:
        self.name, self._diary = name, diary
        self.engine = make_engine(dynamic=name == DYNAMIC)
        self._data = model.micro_batches()
        self.engine.on_rebalance(self._tell_move)

    def _tell_move(self, event: RebalanceEvent) -> None:
        self._diary.say(
            "move", run=self.name, batch=event.batch, before=event.before, after=event.after, seconds=event.seconds
        )

    def train(self, batch: int) -> None:
        """Train one batch; before one of them the front half is frozen."""
        self._diary.at(f"{self.name}, batch {batch + 1}")
        if batch == FREEZE_AT:
            for index, layer in self.engine.local_layers().items():
                layer.requires_grad_(index >= NUM_FROZEN)
            self._diary.say("freeze", run=self.name, batch=batch)
        start_s, boundaries = time.perf_counter(), self.engine.partition
        loss = float(self.engine.train_batch(islice(self._data, model.NUM_MICRO_BATCHES)))
        seconds = time.perf_counter() - start_s
        self._diary.say(
            "batch", run=self.name, batch=batch, boundaries=boundaries, seconds=seconds, loss=loss.hex()
        )


def make_engine(*, dynamic: bool) -> DynamicPipelineEngine:
    """Build the model, the same whatever is asked, and its engine; collective over both ranks."""
    module = DynamicPipelineModule(
        [LayerSpec(layer) for layer in model.LAYERS], loss_fn=model.loss_fn, num_stages=pair.NUM_RANKS,
        partition_method=list(model.START), seed_layers=True, base_seed=model.SEED, seed_fn=torch.manual_seed,
    )  # fmt: skip
    config = model.deepspeed_config(dynamic=dynamic)
    engine: DynamicPipelineEngine = initialize(model=module, config=config, optimizer=model.make_optimizer)
    return engine


def held(engine: DynamicPipelineEngine) -> dict[str, str]:
    """Digests of all weights and of all optimizer state, by layer and name; collective over both ranks."""
    own: dict[str, str] = {}
    assert engine.stage_optimizer is not None
    for index, layer in engine.local_layers().items():
        named = dict(layer.named_parameters())
        states: list[Mapping[str, Any]] = list(engine.stage_optimizer.export(tuple(named.values())))
        for (name, weight), state in zip(named.items(), states, strict=True):
            own[f"{index}.{name}"] = _digest(weight)
            own |= {f"{index}.{name}.{key}": _digest(torch.as_tensor(value)) for key, value in state.items()}
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    return {name: digest for one in everyone for name, digest in one.items()}


def _digest(tensor: Tensor) -> str:
    values = tensor.detach().cpu().contiguous()
    return hashlib.sha256(str(values.dtype).encode() + values.flatten().view(torch.uint8).numpy().tobytes()).hexdigest()


def main(folder: str) -> None:
    """Train both ways and write what came of it."""
    rank = paired.join()
    diary = Diary(Path(folder), rank)
    diary.at("the engines")
    runs = [Run(name, diary) for name in RUNS]
    parameters = sum(weight.numel() for run in runs for weight in run.engine.module.parameters()) // len(runs)
    total = torch.tensor(parameters)
    dist.all_reduce(total)
    diary.say("start", num_layers=NUM_LAYERS, num_parameters=int(total), boundaries=model.START)
    for start in range(0, NUM_BATCHES, WINDOW):
        for run in runs if start // WINDOW % 2 else reversed(runs):
            for batch in range(start, start + WINDOW):
                run.train(batch)
    digests = [held(run.engine) for run in runs]
    diary.say("end", equal=digests[0] == digests[1], num_tensors=len(digests[0]))
    timelines = {run.name: run.engine.timeline() for run in runs}
    if rank == 0:
        save_gantt(Path(folder) / PICTURE, timelines, title="a batch of each run at the end")
    dist.barrier()  # one that left early would break the other's connections


if __name__ == "__main__":
    main(sys.argv[1])
