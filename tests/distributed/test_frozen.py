"""Freezing front to back while training: the same bits whatever the cut, and nothing done in vain."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dynpipe_ds.messages.channels import Outgoing
from dynpipe_ds.messages.traffic import Kind, Message
from tests.distributed.clients import compile_first
from tests.distributed.configs import ADAMW, CLIP, EVEN, FUSED, OPTIMIZERS
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

WARMUP_PARAMS = {"warmup_min_lr": 0.005, "warmup_max_lr": 0.02, "warmup_num_steps": 6}
WARMUP = {"scheduler": {"type": "WarmupLR", "params": WARMUP_PARAMS}}

# Batch -> number of frozen layers from it on, of 8: part of a stage, more than one stage, all but the
# head, and back in two steps.
SCHEDULE = {1: 2, 2: 4, 4: 7, 5: 3, 7: 0}
NUM_BATCHES = 9
# At batches 1 and 5 the stage whose layers were just frozen takes no part in the move.
MOVES = {
    2: {1: (0, 2, 8), 2: (0, 6, 8), 4: (0, 1, 8), 5: (0, 3, 8), 7: (0, 5, 8), 8: (0, 7, 8)},
    3: {1: (0, 3, 5, 8), 2: (0, 1, 7, 8), 4: (0, 5, 6, 8), 5: (0, 5, 7, 8), 7: (0, 1, 2, 8), 8: (0, 2, 5, 8)},
}
OTHER_CUT = {2: (0, 7, 8), 3: (0, 1, 5, 8)}


@dataclass
class Trained:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    weights: list[dict[int, str]] = field(default_factory=list)  # after each batch, by layer
    digest: dict[str, str] = field(default_factory=dict)


def freeze(engine: Any, num_frozen: int) -> None:
    for index, layer in engine.local_layers().items():
        layer.requires_grad_(index >= num_frozen)


@contextmanager
def counted_sends(engine: Any) -> Iterator[list[int]]:
    """Count what this stage sends to the previous one: gradients, nothing else."""
    count, original = [0], Outgoing.send

    def send(out: Outgoing, message: Message, told: Any, tensors: Sequence[torch.Tensor]) -> None:
        count[0] += len(tensors) * (message.kind is Kind.GRADIENT)
        original(out, message, told, tensors)

    with patch.object(Outgoing, "send", send):
        yield count


def check_frozen(engine: Any, num_frozen: int) -> None:
    """Frozen parameters hold no gradient and no optimizer state; the others do."""
    optimizer = engine.stage_optimizer
    for index, layer in engine.local_layers().items():
        for parameter in layer.parameters():
            if index < num_frozen:
                assert parameter.grad is None and optimizer.gradient(parameter) is None
                assert optimizer.export([parameter])[0] == {} and optimizer.state_bytes(parameter) == 0
            else:
                assert {"exp_avg", "exp_avg_sq"} <= optimizer.export([parameter])[0].keys()
    profile = engine.last_batch_profile
    for layer in profile.layers[:num_frozen]:
        assert layer.backward_s == layer.gradient_bytes == layer.optimizer_state_bytes == 0, layer
        assert layer.activation_bytes == 0, layer
    for layer in profile.layers[num_frozen:]:
        assert layer.backward_s > 0 and layer.gradient_bytes > 0 and layer.optimizer_state_bytes > 0, layer


def train_freezing(run: Run, cut: tuple[int, ...], moves: dict[int, tuple[int, ...]]) -> Trained:
    engine = make_engine(replace(run, first=cut))
    batches, seen, num_frozen = data(engine.grid.get_data_parallel_id(), run.micro_batches), Trained(), 0
    for batch in range(NUM_BATCHES):
        if batch in SCHEDULE:
            num_frozen = SCHEDULE[batch]
            freeze(engine, num_frozen)
        if batch in moves:
            engine.repartition(moves[batch])
        with counted_sends(engine) as sends:
            seen.losses.append(float(engine.train_batch(batches)))
        trained_before = not engine.is_first_stage() and num_frozen < engine.partition[engine.stage_id]
        assert sends == [run.micro_batches if trained_before else 0], (batch, engine.partition)
        check_frozen(engine, num_frozen)
        seen.weights.append({
            i: hashlib.sha256(b"".join(
                p.detach().view(-1).view(torch.uint8).numpy().tobytes() for p in layer.parameters()
            )).hexdigest()
            for i, layer in engine.local_layers().items()
        })
    seen.digest = digest(engine)
    return seen


def some_ways(_rank: int, run: Run, elsewhere: bool) -> list[Trained]:
    """Static, moving, and perhaps static at another cut."""
    stages = run.num_stages
    ways = [train_freezing(run, EVEN[stages], {}), train_freezing(run, EVEN[stages], MOVES[stages])]
    return [*ways, train_freezing(run, OTHER_CUT[stages], {})] if elsewhere else ways


def compare(run: Run, replicas: int = 1, *, elsewhere: bool = False) -> list[float]:
    by_rank = run_ranks(some_ways, run.num_stages * replicas, run, elsewhere)
    for replica in range(replicas):
        static, *others = (
            merged([by_rank[s * replicas + replica][way] for s in range(run.num_stages)])
            for way in range(2 + elsewhere)
        )
        for other in others:
            assert static.losses == other.losses
            assert static.digest == other.digest
            assert static.weights == other.weights
        assert all(loss == loss for loss in static.losses)
        check_weights(static.weights)
    return static.losses


def merged(stages: list[Trained]) -> Trained:
    whole = Trained(losses=stages[0].losses, weights=[{} for _ in range(NUM_BATCHES)])
    for stage in stages:
        whole.digest |= stage.digest
        for batch in range(NUM_BATCHES):
            whole.weights[batch] |= stage.weights[batch]
    assert len(whole.digest) == 8
    return whole


def check_weights(weights: list[dict[int, str]]) -> None:
    """Exactly the layers that are not frozen have changed in each batch."""
    num_frozen = 0
    for batch in range(1, NUM_BATCHES):
        num_frozen = SCHEDULE.get(batch, num_frozen)
        for layer in range(8):
            same = weights[batch][layer] == weights[batch - 1][layer]
            assert same == (layer < num_frozen), (batch, layer)


@pytest.mark.parametrize(
    ("optimizer", "stages"),
    mostly(product(OPTIMIZERS, [2, 3]), [("adamw", 3), ("zero1", 2)]),
)
def test_freezing_while_training(optimizer: str, stages: int) -> None:
    run = Run(num_stages=stages, config={**OPTIMIZERS[optimizer], **CLIP, **WARMUP})
    compare(run, elsewhere=stages == 3)


def test_freezing_with_fused_adam() -> None:
    """FusedAdam counts steps in the state of a group's last parameter that has a gradient."""
    compile_first("fused_adam")
    compare(Run(num_stages=3, config={**FUSED, **CLIP}))


@pytest.mark.parametrize("optimizer", mostly(["adamw", "bf16_zero1_fp32_sums"], ["bf16_zero1_fp32_sums"]))
def test_freezing_with_two_replicas(optimizer: str) -> None:
    compare(Run(num_stages=2, config={**OPTIMIZERS[optimizer], **CLIP}), replicas=2)


def test_freezing_under_activation_checkpointing() -> None:
    run = Run(num_stages=3, dropout=0.2, config={**ADAMW, **CLIP})
    assert compare(replace(run, checkpoint_interval=1)) == compare(run)


# -- tied layers ------------------------------------------------------------------------------


def freeze_tied(_rank: int) -> None:
    engine = make_engine(Run(num_stages=2, tied=True, first=EVEN[2]))
    batches = data(0, 4)
    engine.train_batch(batches)
    layers = engine.local_layers()
    for layer in layers.keys() & {0, 7}:
        layers[layer].requires_grad_(False)
    before = {i: layers[i].weight.clone() for i in layers.keys() & {0, 7}}
    engine.train_batch(batches)
    for i, weight in before.items():
        assert torch.equal(layers[i].weight, weight) and layers[i].weight.grad is None
    if engine.is_first_stage():
        layers[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"tied layers \[0, 7\] \(key 'embed'\) are frozen in one place and"):
        engine.train_batch(batches)


def test_tied_layers_are_frozen_together_or_not_at_all() -> None:
    run_ranks(freeze_tied, 2)
