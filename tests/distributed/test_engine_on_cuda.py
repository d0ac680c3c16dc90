"""The engine on a device that two processes share: what moves trains on with the same bits; what is saved, too."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch

from tests.devices import ON_DEVICES, device_of
from tests.distributed.configs import ADAMW, BF16
from tests.distributed.models import Run, data, digest, make_engine, train
from tests.distributed.ranks import run_ranks

RUN = Run(2, num_batches=4, dropout=0.1, config={**ADAMW, **BF16}, micro_batches=2)
MOVES = {1: (0, 1, 8), 3: (0, 6, 8)}
CUBLAS = ":4096:8"


def with_and_without_moves(_rank: int, kind: str) -> list[Any]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = CUBLAS
    torch.use_deterministic_algorithms(True)
    found = []
    for moves in ({}, MOVES):
        engine = make_engine(replace(RUN, moves=moves))
        assert engine.device.type == kind
        found.append((train(engine, replace(RUN, moves=moves)), digest(engine)))
        peaks = [stage.peak_memory_bytes for stage in engine.profile.stages]
        assert kind == "cpu" or min(peaks) > 0
    return found


@ON_DEVICES
def test_moves_change_no_bit(kind: str) -> None:
    device_of(kind)
    first, second = run_ranks(with_and_without_moves, 2, kind, shares_device=True)
    for losses, _ in first:
        assert losses == first[0][0]
    static, moved = ({**its[1], **theirs[1]} for its, theirs in zip(first, second, strict=True))
    assert len(static) == 8 and static == moved


def saved_and_loaded(_rank: int, kind: str, folder: str) -> tuple[list[float], list[float]]:
    """Losses after a checkpoint, and again after it was loaded; dropout draws from the device's own stream."""
    run = Run(1, dropout=0.5, config=ADAMW, micro_batches=2)
    engine = make_engine(run)
    engine.module.seed_layers = False
    batches = data(0, 2)
    engine.train_batch(batches)
    given = [next(batches) for _ in range(4)]
    engine.save_checkpoint(folder)
    first = [float(engine.train_batch(iter(given[i : i + 2]))) for i in (0, 2)]
    engine.load_checkpoint(folder)
    return first, [float(engine.train_batch(iter(given[i : i + 2]))) for i in (0, 2)]


@ON_DEVICES
def test_random_streams_are_saved(kind: str, tmp_path: Any) -> None:
    device_of(kind)
    first, again = run_ranks(saved_and_loaded, 1, kind, str(tmp_path), shares_device=True)[0]
    assert first == again
