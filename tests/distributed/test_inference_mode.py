"""Whatever an engine is told to do inside ``torch.inference_mode()``, training goes on with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dynpipe_ds import ParameterReplacement
from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, CLIP, ZERO
from tests.distributed.models import Block, Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

OPTIMIZERS = {"adamw": ADAMW, "zero1": {**ADAMW, **ZERO}, "bf16": {**ADAMW, **BF16_FP32_SUMS}}


def evaluate(engine: Any, _folder: str) -> Any:
    loss, logits = engine.eval_batch(data(9, 4), return_logits=True)
    return float(loss), logits is not None


def repartition(engine: Any, _folder: str) -> Any:
    assert engine.repartition((0, 1, 6)).after == (0, 1, 6)


def there_and_back(engine: Any, _folder: str) -> Any:
    engine.repartition((0, 5, 6))
    engine.repartition((0, 3, 6))


def save(engine: Any, folder: str) -> Any:
    return engine.save_checkpoint(folder, tag="here")


def save_and_load(engine: Any, folder: str) -> Any:
    engine.save_checkpoint(folder, tag="here")
    return engine.load_checkpoint(folder, tag="here")[0] is not None


def new_shape(engine: Any, _folder: str) -> Any:
    blocks = [layer for layer in engine.local_layers().values() if isinstance(layer, Block)]
    # Made outside: a parameter that is made inside can't be trained at all.
    with torch.inference_mode(False):
        made = [nn.Parameter(block.up.weight.detach().clone().flatten()) for block in blocks]
    engine.replace_parameters([
        ParameterReplacement(block.up, "weight", parameter, torch.flatten)
        for block, parameter in zip(blocks, made, strict=True)
    ])
    with torch.inference_mode(False):
        made = [nn.Parameter(block.up.weight.detach().clone().view(block.up.out_features, -1)) for block in blocks]
    engine.replace_parameters([
        ParameterReplacement(block.up, "weight", parameter, lambda t, rows=block.up.out_features: t.view(rows, -1))
        for block, parameter in zip(blocks, made, strict=True)
    ])  # fmt: skip


def freeze(engine: Any, folder: str) -> Any:
    for index, layer in engine.local_layers().items():
        layer.requires_grad_(index >= 2)
    engine.save_checkpoint(folder, tag="here")  # the optimizer is rebuilt here


def look(engine: Any, _folder: str) -> Any:
    assert len(engine.profile.layers) == 6 and len(engine.last_batch_profile.stages) == 2


CALLS: list[Callable[[Any, str], Any]] = [
    evaluate, repartition, there_and_back, save, save_and_load, new_shape, freeze, look,
]


def train_around(run: Run, call: Callable[[Any, str], Any], folder: str, mode: Callable[[], Any]) -> Any:
    engine, batches = make_engine(run), data(0, 4)
    losses = [float(engine.train_batch(batches))]
    with mode():
        seen = call(engine, folder)
    losses += [float(engine.train_batch(batches))]
    with mode():
        call(engine, folder) if call is evaluate else None
    engine.repartition((0, 2, 6))  # what was made inside must be able to travel
    losses += [float(engine.train_batch(batches)) for _ in range(2)]
    return seen, losses, digest(engine)


def inside_and_outside(_rank: int, run: Run, call: Callable[[Any, str], Any], folder: str) -> None:
    modes = torch.enable_grad, torch.no_grad, torch.inference_mode
    expected, *found = (train_around(run, call, str(Path(folder, mode.__name__)), mode) for mode in modes)
    for other in found:
        assert other == expected


@pytest.mark.parametrize(
    ("call", "optimizer"),
    mostly(
        [pytest.param(call, name, id=f"{call.__name__}-{name}") for call in CALLS for name in OPTIMIZERS],
        ["evaluate-adamw", "repartition-zero1", "save_and_load-adamw", "new_shape-zero1", "freeze-bf16"],
    ),
)
def test_calls_inside_inference_mode(call: Callable[[Any, str], Any], optimizer: str, tmp_path: Path) -> None:
    run = Run(num_stages=2, num_blocks=4, first=(0, 3, 6), config={**OPTIMIZERS[optimizer], **CLIP})
    run_ranks(inside_and_outside, 2, run, call, str(tmp_path))


def make_inside(_rank: int, run: Run) -> None:
    engine = make_engine(replace(run, first=(0, 3, 6)))
    block = next(layer for layer in engine.local_layers().values() if isinstance(layer, Block))
    before = digest(engine)
    with torch.inference_mode():
        made = nn.Parameter(block.up.weight.detach().clone().flatten())
    with pytest.raises(RuntimeError, match=r"rank 0: .*'weight' of Linear was made inside torch.inference_mode\(\)"):
        engine.replace_parameters([ParameterReplacement(block.up, "weight", made, torch.flatten)])
    assert digest(engine) == before


def test_a_parameter_that_was_made_inside_is_refused() -> None:
    run_ranks(make_inside, 2, Run(num_stages=2, num_blocks=4, config=ADAMW))
