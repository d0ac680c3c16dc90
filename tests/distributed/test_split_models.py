"""Layers of many kinds in stages that split their backwards: the bits are those of 1F1B."""

from __future__ import annotations

from dataclasses import dataclass
from unittest.mock import patch

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynpipe_ds import DynamicPipelineModule
from dynpipe_ds.host import halves
from tests.distributed.configs import ADAMW, BY_HAND, CLIP
from tests.distributed.models import digest
from tests.distributed.ranks import run_ranks
from tests.distributed.splitting import AT_THE_END, Way, counting_splits, order_for_of
from tests.splitting.blocks import WIDTH, Attention, Changing, Hooked, Mlp, Own, Refusing, Sharing, Views


class Forked(nn.Module):
    """One tensor in, several out: one wants no gradient, one is used by nobody later."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.aside = Mlp(), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.mlp(x), x, torch.arange(4.0), self.aside(x)


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, values: tuple[Tensor, ...]) -> Tensor:
        x, skipped, numbers, _ = values
        return self.mlp(x) + skipped * numbers[:, None]


class Recomputed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Reentrant(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=True)


class Sometimes(Mlp):
    """Can be split in every other micro-batch: what waits of the one before must be added up first."""

    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        return super().forward(x) if self.num_forwards % 2 else checkpoint(super().forward, x, use_reentrant=True)


class Strict(Mlp):
    """Has a function that does not let itself be asked for some gradients only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Refusing.apply(x))


class Thrice(Sharing):
    def __init__(self) -> None:
        super().__init__(3)


class Mixed(Sharing):
    def __init__(self) -> None:
        super().__init__(5, mixed=True)


class Viewed(Views):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1)


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


KINDS: dict[str, list[type[nn.Module]]] = {
    "tuples": [Mlp, Mlp, Forked, Joined, Mlp, Mlp],
    "several outputs over a cut": [Mlp, Mlp, Mlp, Forked, Joined, Mlp],
    "functions": [Own, Mlp, Own, Changing, Own, Mlp],
    "frozen prefix": [Frozen, Frozen, Mlp, Mlp, Attention, Mlp],
    "frozen stage": [Frozen, Frozen, Frozen, Frozen, Frozen, Mlp],
    "frozen middle": [Mlp, Mlp, Frozen, Frozen, Mlp, Attention],
    "sharing": [Thrice, Mlp, Mixed, Viewed, Thrice, Mixed],
    "hooks": [Hooked, Mlp, Hooked, Mlp, Hooked, Hooked],
    "recomputed": [Mlp, Recomputed, Recomputed, Mlp, Recomputed, Mlp],
    "reentrant": [Mlp, Mlp, Mlp, Mlp, Reentrant, Mlp],
    "strict": [Mlp, Mlp, Mlp, Strict, Mlp, Strict],
    "sometimes": [Mlp, Mlp, Mlp, Sometimes, Mlp, Sometimes],
}
TYPICAL = ("several outputs over a cut", "functions", "recomputed", "hooks", "reentrant", "strict", "sometimes")
REENTRANT = "reentrant activation checkpointing"
WHOLE = {"reentrant": REENTRANT, "strict": "RuntimeError: call backward() instead", "sometimes": REENTRANT}
MOVED = {2: (0, 2, 6), 3: (0, 1, 2, 6)}


CONFIG = {
    **ADAMW, **CLIP, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "steps_per_print": 10**9,
    "dynamic_pipeline": BY_HAND,
}  # fmt: skip


def loss_fn(x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(x, target)


@dataclass(frozen=True)
class Seen:
    """What one rank saw of one run; only the first field says what it trained."""

    bits: tuple[list[float], dict[str, str], float, list[list[str]]]
    num_split: int
    whole_because: tuple[str, ...]
    told: list[str]


def train_kind(kind: str, num_stages: int, way: Way) -> Seen:
    torch.manual_seed(5)
    module = DynamicPipelineModule(
        [LayerSpec(layer) for layer in KINDS[kind]], num_stages=num_stages, loss_fn=loss_fn, partition_method="uniform"
    )
    told: list[str] = []
    with counting_splits() as split, patch.object(halves.log, "info", lambda text, *_: told.append(text)):
        engine, *_ = deepspeed.initialize(model=module, config=CONFIG)
        engine.dynamic.pipeline.order_for = order_for_of(way)
        draw = torch.Generator().manual_seed(1)
        batches = iter(lambda: tuple(torch.randn(2, 4, WIDTH, generator=draw) for _ in range(2)), None)
        losses = []
        for batch in range(4):
            if batch == 2:
                engine.repartition(MOVED[num_stages])
            losses.append(float(engine.train_batch(batches)))
        seen = [sorted(layer.seen) for layer in engine.local_layers().values() if hasattr(layer, "seen")]
        bits = losses, digest(engine), float(engine.get_global_grad_norm()), seen
        whole = [text for text in told if "runs its backwards whole" in text]
        return Seen(bits, len(split), engine.dynamic.pipeline.in_flight.whole_because, whole)


def train_each(_rank: int, kinds: list[str], num_stages: int, ways: list[Way]) -> dict[str, list[Seen]]:
    return {kind: [train_kind(kind, num_stages, way) for way in ways] for kind in kinds}


def compare(kinds: list[str], num_stages: int, ways: list[Way]) -> None:
    for rank, found in enumerate(run_ranks(train_each, num_stages, kinds, num_stages, [None, *ways])):
        for kind, (plain, *others) in found.items():
            assert plain.num_split == 0 and not plain.told and all(loss == loss for loss in plain.bits[0])
            for way, other in zip(ways, others, strict=True):
                assert other.bits == plain.bits, f"{kind}, rank {rank}, W: {way}"
                is_last = rank == num_stages - 1
                check_split(kind, other, is_last=is_last, holds_it=is_last or (rank > 0 and kind != "reentrant"))


def check_split(kind: str, seen: Seen, *, is_last: bool, holds_it: bool) -> None:
    """A stage splits, or says once why not: the last one, and others that hold what can't be split."""
    reasons = tuple(reason for reason in (WHOLE.get(kind),) if reason and holds_it)
    assert seen.whole_because == reasons
    assert len(seen.told) == len(reasons)
    assert all(text.endswith(f"can't be split: {WHOLE[kind]}") for text in seen.told)
    splits = kind == "sometimes" or not reasons
    assert bool(seen.num_split) == splits or not is_last or kind == "frozen stage"


def test_the_bits_are_those_of_1f1b() -> None:
    compare(list(TYPICAL), 2, ["planned"])
    compare(["sometimes"], 3, [2])


@pytest.mark.exhaustive
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_1f1b_with_every_kind(kind: str, num_stages: int) -> None:
    compare([kind], num_stages, [0, 1, AT_THE_END, "planned"])


def try_by_batch(_rank: int) -> list[tuple[int, int]]:
    """How many backwards were tried to split, and were, in each batch; what can't be split leaves before the third."""
    torch.manual_seed(5)
    layers = [LayerSpec(layer) for layer in (Mlp, Mlp, Mlp, Strict, Mlp, Mlp)]
    module = DynamicPipelineModule(layers, num_stages=2, loss_fn=loss_fn, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=module, config=CONFIG)
    engine.dynamic.pipeline.order_for = order_for_of(1)
    engine.profiling = False  # a micro-batch whose activations are counted runs whole
    draw = torch.Generator().manual_seed(1)
    batches = iter(lambda: tuple(torch.randn(2, 4, WIDTH, generator=draw) for _ in range(2)), None)
    found, tried = [], patch.object(halves, "backward_inputs", wraps=halves.backward_inputs)
    for batch in range(4):
        if batch == 2:
            engine.repartition((0, 4, 6))
        with tried as calls, patch.object(halves.InFlight, "owe", autospec=True, side_effect=OWE) as owed:
            engine.train_batch(batches)
        found.append((calls.call_count, owed.call_count))
    return found


OWE = halves.InFlight.owe


def test_what_failed_is_tried_again_with_other_layers_only() -> None:
    first, last = run_ranks(try_by_batch, 2)
    assert first == [(0, 0)] * 4 and last == [(1, 0), (0, 0), (4, 4), (4, 4)]
