"""One of the two processes: ``python -m dynpipe_ds.cli.numerics.rank FOLDER`` trains every mode on every course."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dynpipe_ds import DynamicPipelineEngine, DynamicPipelineModule
from dynpipe_ds.cli import pair, paired
from dynpipe_ds.cli.numerics.model import (
    COURSES,
    DROPOUT_SEED,
    MODES,
    NUM_BATCHES,
    NUM_MICRO_BATCHES,
    NUM_STAGES,
    Course,
    Embedding,
    Mode,
    loss_fn,
    make_optimizer,
    make_scheduler,
    micro_batches,
)
from dynpipe_ds.cli.numerics.record import LOSS, NORM, Quantity, Record, note, note_layer, save
from dynpipe_ds.host.specs import LayerSpec, TiedLayerSpec
from dynpipe_ds.host.start import activation_checkpointing, initialize


def record_file(folder: Path, mode: Mode, course: Course, rank: int) -> Path:
    """Where a rank leaves what it measured."""
    return folder / f"{MODES.index(mode)}-{COURSES.index(course)}-{rank}.pt"


def run_rank(folder: Path, modes: Sequence[Mode] = MODES, courses: Sequence[Course] = COURSES) -> None:
    """Train, in an initialized world of two ranks, and write one record for each mode and course."""
    rank = torch.distributed.get_rank()
    for mode in modes:
        for course in courses:
            save(train_divided(mode, course, pair.progress_file(folder, rank)), record_file(folder, mode, course, rank))


def train_divided(mode: Mode, course: Course, progress: Path) -> Record:
    """Train and evaluate the divided model, saying in a file what it is at; collective over both ranks.

    Returns losses and norms, and the own layers after every batch.
    """

    def tell(batch: int, what: str) -> None:
        progress.write_text(f"{mode.name}, {course.at(batch)}, {what}", encoding="utf-8")

    tell(0, "the start")
    engine = make_engine(mode, course)
    record: Record = {}
    data, moves = micro_batches(), dict(course.moves)
    for batch in range(NUM_BATCHES):
        tell(batch, f"batch {batch + 1}")
        if batch in moves:
            engine.repartition(moves[batch])
        if mode.freezes is not None and mode.freezes[0] == batch and mode.freezes[1] in engine.local_layers():
            engine.local_layers()[mode.freezes[1]].requires_grad_(False)
        note(record, Quantity(batch, LOSS), float(engine.train_batch(islice(data, NUM_MICRO_BATCHES))))
        if mode.clipping:
            note(record, Quantity(batch, NORM), _norm(engine))
        for layer, module in engine.local_layers().items():
            note_layer(record, batch, layer, module, _states(engine, module))
    tell(NUM_BATCHES, "the evaluation")
    note(record, Quantity(NUM_BATCHES, LOSS), float(engine.eval_batch(micro_batches(6))))
    return record


def make_engine(mode: Mode, course: Course) -> DynamicPipelineEngine:
    """Build the divided model; collective over both ranks."""
    specs: list[Any] = [LayerSpec(*layer) for layer in mode.layers()]
    if mode.tied:
        embedding = partial(TiedLayerSpec, "embedding", *mode.layers()[0], tied_weight_attr="weight")
        specs[0], specs[-1] = embedding(), embedding(forward_fn=Embedding.logits)
    module = DynamicPipelineModule(
        specs, loss_fn=loss_fn, num_stages=NUM_STAGES, partition_method=list(course.first),
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
    weights = dict(layer.named_parameters())
    exported = engine.stage_optimizer.export(tuple(weights.values()))
    found: dict[str, dict[str, Tensor]] = {}
    for (name, weight), state in zip(weights.items(), exported, strict=True):
        found[name] = {
            key: value.view_as(weight) if isinstance(value, Tensor) and value.numel() == weight.numel() else value
            for key, value in state.items()
        }
    return found


def main(folder: str) -> None:
    """Be one rank; ``RANK``, ``WORLD_SIZE`` and the address of the first are in the environment."""
    paired.join()
    run_rank(Path(folder))
    torch.distributed.barrier()  # one that left early would break the other's connections


if __name__ == "__main__":
    main(sys.argv[1])
