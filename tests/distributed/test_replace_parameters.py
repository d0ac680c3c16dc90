"""Parameters that change their shape while training keep what the optimizer knows of their elements."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynpipe_ds import MigrationError, ParameterReplacement
from tests.distributed.configs import BF16, EVEN, TORCH_ADAMW
from tests.distributed.models import Block, Run, digest, make_engine, train
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

CONFIGS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "zero1": {"zero_optimization": {"stage": 1}},
    "bf16": BF16,
}


def flatten_weights(engine: Any) -> None:
    """Give every block's first weight another shape with the same elements in the same order."""
    engine.replace_parameters([
        ParameterReplacement(
            layer.up, "weight", nn.Parameter(layer.up.weight.detach().clone().flatten()), torch.flatten
        )
        for layer in engine.local_layers().values() if isinstance(layer, Block)
    ])


def fold_weights(engine: Any) -> None:
    """Undo it."""
    engine.replace_parameters([
        ParameterReplacement(
            layer.up, "weight",
            nn.Parameter(layer.up.weight.detach().clone().view(layer.up.out_features, -1)),
            lambda t, rows=layer.up.out_features: t.view(rows, -1),
        )
        for layer in engine.local_layers().values() if isinstance(layer, Block)
    ])  # fmt: skip


def there_and_back(engine: Any, batch: int) -> None:
    if batch in (2, 4):
        flatten_weights(engine)
        engine.repartition((0, 5, 8) if batch == 2 else (0, 3, 8))
        fold_weights(engine)


def run_twice(_rank: int, run: Run) -> tuple[Any, Any]:
    """Losses and digests of a run without replacements, and of one with."""
    results = []
    for on_batch in (None, there_and_back):
        engine = make_engine(run)
        results.append((train(engine, run, on_batch), digest(engine)))
    return results[0], results[1]


@pytest.mark.parametrize(
    ("config", "ranks"), mostly(product(CONFIGS, [2, 4]), [("adamw", 2), ("zero1", 4), ("bf16", 2)])
)
def test_another_shape_and_back_leaves_no_trace(config: str, ranks: int) -> None:
    run = Run(2, num_batches=6, first=EVEN[2], moves={5: (0, 4, 8)}, config={
        **TORCH_ADAMW, "gradient_clipping": 0.5, **CONFIGS[config]})
    for plain, replaced in run_ranks(run_twice, ranks, run):
        assert plain[0] == replaced[0]
        assert plain[1] == replaced[1]


def shrink(_rank: int) -> dict[str, Any]:
    """Keep the first half of every weight's elements, and look at the state."""
    run = Run(2, num_batches=2)
    engine = make_engine(run)
    train(engine, run)
    found: dict[str, Any] = {}

    def first_half(t: Tensor) -> Tensor:
        return t.flatten()[: t.numel() // 2]

    blocks = [layer for layer in engine.local_layers().values() if isinstance(layer, Block)]
    before = [engine.stage_optimizer.export([b.up.weight])[0]["exp_avg"].clone() for b in blocks]
    engine.replace_parameters([
        ParameterReplacement(b.up, "weight", nn.Parameter(first_half(b.up.weight.detach()).clone()), first_half)
        for b in blocks
    ])
    after = [engine.stage_optimizer.export([b.up.weight])[0] for b in blocks]
    found["kept"] = all(torch.equal(first_half(b), a["exp_avg"]) for b, a in zip(before, after, strict=True))
    found["step"] = [float(a["step"]) for a in after]
    return found


def test_a_smaller_parameter_has_less_state() -> None:
    for found in run_ranks(shrink, 2):
        assert found["kept"]
        assert set(found["step"]) == {2.0}


def fail_on_one_rank(rank: int) -> tuple[str, bool]:
    """One rank gives a state of the wrong shape: nobody changes anything."""
    run = Run(2, num_batches=2)
    engine = make_engine(run)
    losses = train(engine, run)
    layer = next(layer for layer in engine.local_layers().values() if isinstance(layer, Block))
    old, before = layer.up.weight, digest(engine)
    carry = (lambda t: t.flatten()[:3]) if rank == 1 else torch.flatten
    try:
        engine.replace_parameters([
            ParameterReplacement(layer.up, "weight", nn.Parameter(old.detach().clone().flatten()), carry)
        ])
    except RuntimeError as error:
        same = layer.up.weight is old and digest(engine) == before
        assert len(train(engine, run)) == len(losses)
        return str(error), same
    return "", False


def test_all_or_nothing() -> None:
    for message, same in run_ranks(fail_on_one_rank, 2):
        assert "replacing parameters failed and was undone on every rank" in message
        assert "carry gave shape (3,) for 'weight'" in message
        assert same


def replace_on_one_replica(rank: int) -> str:
    engine = make_engine(Run(2, num_batches=1))
    layer = next(layer for layer in engine.local_layers().values() if isinstance(layer, Block))
    new = ParameterReplacement(layer.up, "weight", nn.Parameter(layer.up.weight.detach().flatten()), torch.flatten)
    with pytest.raises(MigrationError, match="differ in the shapes of parameters to replace") as caught:
        engine.replace_parameters([] if rank == 2 else [new])
    return str(caught.value)


def test_replicas_that_replace_other_parameters_are_refused() -> None:
    texts = run_ranks(replace_on_one_replica, 4)
    assert len(set(texts)) == 1 and "ranks 2 and 3 are replicas of stage 1" in texts[0]
