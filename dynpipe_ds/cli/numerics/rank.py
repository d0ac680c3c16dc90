"""One of the two processes: ``python -m dynpipe_ds.cli.numerics.rank FOLDER`` trains every mode on every course."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynpipe_ds import DynamicPipelineEngine, DynamicPipelineModule
from dynpipe_ds.cli.numerics.cases import COURSES, MODES, NUM_BATCHES, NUM_STAGES, Course, Mode
from dynpipe_ds.cli.numerics.model import (
    DROPOUT_SEED,
    NUM_LAYERS,
    NUM_MICRO_BATCHES,
    Block,
    Embedding,
    Head,
    as_head,
    loss_fn,
    make_optimizer,
    make_scheduler,
    micro_batches,
)
from dynpipe_ds.cli.numerics.record import LOSS, NORM, Quantity, Record, note, note_layer, save
from dynpipe_ds.host.install import init_distributed
from dynpipe_ds.host.specs import LayerSpec, TiedLayerSpec
from dynpipe_ds.host.start import activation_checkpointing, initialize


def record_file(folder: Path, mode: Mode, course: Course, rank: int) -> Path:
    """Where a rank leaves what it measured.

    Args:
        folder: of all records.
        mode: how the model was trained.
        course: how it was cut.
        rank: of the process.
    """
    return folder / f"{MODES.index(mode)}-{COURSES.index(course)}-{rank}.pt"


def progress_file(folder: Path, rank: int) -> Path:
    """Where a rank says what it is at.

    Args:
        folder: of all records.
        rank: of the process.
    """
    return folder / f"progress-{rank}"


def run_rank(folder: Path, modes: Sequence[Mode] = MODES, courses: Sequence[Course] = COURSES) -> None:
    """Train, in an initialized world of two ranks, and write one record for each mode and course.

    Args:
        folder: for the records.
        modes: to train in.
        courses: to cut along.
    """
    rank = torch.distributed.get_rank()
    for mode in modes:
        for course in courses:
            save(train_divided(mode, course, progress_file(folder, rank)), record_file(folder, mode, course, rank))


def train_divided(mode: Mode, course: Course, progress: Path) -> Record:
    """Train and evaluate the divided model; collective over both ranks.

    Args:
        mode: how.
        course: cut where.
        progress: file that says what this rank is at.

    Returns:
        What this rank measured: losses and norms, and its own layers after every batch.
    """
    progress.write_text(f"{mode.name}, {course.at(0)}, the start", encoding="utf-8")
    engine = make_engine(mode, course)
    record: Record = {}
    data, moves = micro_batches(), dict(course.moves)
    for batch in range(NUM_BATCHES):
        progress.write_text(f"{mode.name}, {course.at(batch)}, batch {batch + 1}", encoding="utf-8")
        if batch in moves:
            engine.repartition(moves[batch])
        if mode.freezes is not None and mode.freezes[0] == batch and mode.freezes[1] in engine.local_layers():
            engine.local_layers()[mode.freezes[1]].requires_grad_(False)
        note(record, Quantity(batch, LOSS), float(engine.train_batch(islice(data, NUM_MICRO_BATCHES))))
        if mode.clipping:
            note(record, Quantity(batch, NORM), _norm(engine))
        for layer, module in engine.local_layers().items():
            note_layer(record, batch, layer, module, _states(engine, module))
    progress.write_text(f"{mode.name}, {course.at(NUM_BATCHES)}, the evaluation", encoding="utf-8")
    note(record, Quantity(NUM_BATCHES, LOSS), float(engine.eval_batch(micro_batches(6))))
    return record


def make_engine(mode: Mode, course: Course) -> DynamicPipelineEngine:
    """Build the divided model; collective over both ranks.

    Args:
        mode: how it is trained.
        course: how it is cut.
    """
    blocks: list[Any] = [
        LayerSpec(Block, i, mode.dropout, not mode.checkpointing, i in mode.frozen) for i in range(1, NUM_LAYERS - 1)
    ]
    frozen = 0 in mode.frozen
    if mode.tied:
        first: Any = TiedLayerSpec("embedding", Embedding, 0, frozen, tied_weight_attr="weight")
        last: Any = TiedLayerSpec("embedding", Embedding, 0, frozen, forward_fn=as_head, tied_weight_attr="weight")
    else:
        first, last = LayerSpec(Embedding, 0, frozen), LayerSpec(Head, NUM_LAYERS - 1)
    module = DynamicPipelineModule(
        [first, *blocks, last], loss_fn=loss_fn, num_stages=NUM_STAGES, partition_method=list(course.first),
        activation_checkpoint_interval=int(mode.checkpointing), seed_layers=True, base_seed=DROPOUT_SEED,
        seed_fn=torch.manual_seed, activation_checkpoint_func=activation_checkpointing(),
    )  # fmt: skip
    engine: DynamicPipelineEngine = initialize(
        model=module, config=mode.deepspeed_config(), optimizer=make_optimizer, lr_scheduler=make_scheduler
    )
    return engine


def _norm(engine: DynamicPipelineEngine) -> float:
    norm = engine.get_global_grad_norm()
    return float("nan") if norm is None else float(norm)


def _states(engine: DynamicPipelineEngine, layer: torch.nn.Module) -> dict[str, dict[str, Tensor]]:
    """A layer's optimizer state by parameter name, in the parameters' shapes."""
    assert engine.stage_optimizer is not None
    names, parameters = zip(*layer.named_parameters(), strict=True)
    return {
        name: {
            key: value.view_as(parameter) if isinstance(value, Tensor) and value.numel() == parameter.numel() else value
            for key, value in state.items()
        }
        for name, parameter, state in zip(
            names, parameters, engine.stage_optimizer.export(parameters), strict=True
        )
    }  # fmt: skip


def main(folder: str) -> None:
    """Be one rank; ``RANK``, ``WORLD_SIZE`` and the address of the first are in the environment.

    Args:
        folder: for the records.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    init_distributed("gloo")
    run_rank(Path(folder))
    torch.distributed.barrier()  # one that left early would break the other's connections


def _end_with_parent() -> None:
    sys.stdin.read()  # its other end is the parent's, and closes with it
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
