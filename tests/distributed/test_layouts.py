"""How tensors lie in memory is the same on both sides of a cut: the bits are those of the undivided model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, CLIP, ZERO
from tests.distributed.models import HIDDEN, LENGTH, VOCABULARY, Block, Embed, Head, data
from tests.distributed.ranks import run_ranks
from tests.distributed.test_shapes import Case, Outcome, changing_lengths, make, train
from tests.matrix import mostly
from tests.once import Once

NUM_BATCHES = 3


def cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """All partitions in which every stage has a layer."""
    return [(0, *inner, num_layers) for inner in combinations(range(1, num_layers), num_stages - 1)]


def train_each(_rank: int, cases: list[Case]) -> list[Outcome]:
    return [train(case, case.moves) for case in cases]


def case_of(layers: Callable[[], list[Any]], **kwargs: Any) -> Case:
    return Case(layers, 1, (0, len(layers())), {}, num_batches=NUM_BATCHES, **kwargs)


@Once
def train_undivided(case: Case) -> Outcome:
    outcome: Outcome = run_ranks(train_each, 1, [case])[0][0]
    return outcome


def compare_with_undivided(undivided: Case, num_stages: int, some: slice = slice(None)) -> Outcome:
    """Train on one stage, on every cut, and once through all cuts; all must agree on every bit."""
    num_layers = undivided.first[-1]
    found = cuts(num_layers, num_stages)[some]
    static = [replace(undivided, num_stages=num_stages, first=cut) for cut in found]
    moves = {batch: found[(2 * batch + 1) % len(found)] for batch in range(1, NUM_BATCHES)}
    whole = train_undivided(undivided)
    assert len(set(whole.losses)) == NUM_BATCHES and all(loss == loss for loss in whole.losses)
    by_rank = run_ranks(train_each, num_stages, [*static, replace(static[0], moves=moves)])
    for i, name in enumerate([*map(str, found), f"moving along {moves}"]):
        outcomes = [rank[i] for rank in by_rank]
        assert outcomes[0].losses == whole.losses, f"losses differ: {name}"
        assert {k: v for o in outcomes for k, v in o.digest.items()} == whole.digest, f"layers differ: {name}"
    return whole


# -- convolutions -----------------------------------------------------------------------------


def lies_in_channels(x: Tensor) -> Tensor:
    assert x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return x


class Convolution(nn.Module):
    """Changes its input in place, as convolution models do."""

    def __init__(self, width_in: int, width_out: int, norm: type[nn.Module], size: int = 3) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(width_in, width_out, size, padding=size // 2)
        self.norm = nn.GroupNorm(4, width_out) if norm is nn.GroupNorm else norm(width_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolve(lies_in_channels(x).to(self.convolve.weight.dtype).relu_()))


def pool(x: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(lies_in_channels(x), 2)


class ImageHead(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(lies_in_channels(x).mean((2, 3)))


def convolution_layers(norm: type[nn.Module] = nn.BatchNorm2d) -> list[Any]:
    return [
        LayerSpec(Convolution, 3, 16, norm), LayerSpec(Convolution, 16, 24, nn.GroupNorm), pool,
        LayerSpec(Convolution, 24, 20, norm), LayerSpec(Convolution, 20, 20, nn.GroupNorm, 1),
        LayerSpec(ImageHead, 20),
    ]


def grouped_layers() -> list[Any]:
    return convolution_layers(nn.GroupNorm)


def images() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    while True:
        x = torch.randn(2, 3, 14, 14, generator=generator).to(memory_format=torch.channels_last)
        yield x, torch.randint(VOCABULARY, (2,), generator=generator)


def usual_images() -> Iterator[tuple[Tensor, Tensor]]:
    return ((x.contiguous(), labels) for x, labels in images())


def weights_in_channels(engine: Any, batch: int) -> None:
    """DeepSpeed's ``initialize`` refuses such weights, so they are made so after it."""
    if batch == 0:
        engine.module.to(memory_format=torch.channels_last)
    for parameter in engine.module.parameters():
        state = engine.stage_optimizer.export([parameter])[0]
        for tensor in (parameter, *(v for v in state.values() if isinstance(v, Tensor) and v.dim() == 4)):
            assert tensor.dim() < 4 or tensor.is_contiguous(memory_format=torch.channels_last)


CONVOLUTIONS = case_of(convolution_layers, batches=images)
CONVOLVING = {
    "adamw": replace(CONVOLUTIONS, before_batch=weights_in_channels),
    # Flat buffers hold weights in the usual order, whatever the cut.
    "zero1": replace(CONVOLUTIONS, config={**ADAMW, **ZERO, **CLIP}),
    "bf16": replace(CONVOLUTIONS, layers=grouped_layers, config={**ADAMW, **BF16_FP32_SUMS, **CLIP}),
}


@pytest.mark.parametrize(
    ("optimizer", "num_stages"),
    mostly(product(CONVOLVING, [2, 3, 4]), [("adamw", 2)]),
)
def test_convolutions(optimizer: str, num_stages: int) -> None:
    compare_with_undivided(CONVOLVING[optimizer], num_stages)


# -- other layouts ----------------------------------------------------------------------------


class Turn(nn.Module):
    """A block that takes (b, s, h) and gives (s, b, h), or the other way round, as GPT-NeoX does."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).transpose(0, 1)


def turning_layers() -> list[Any]:
    return [LayerSpec(Embed), *(LayerSpec(Turn) for _ in range(4)), LayerSpec(Head)]


class Volumes(Embed):
    """Tokens to (batch, length, 4, 2, 2), the dimensions in another order in memory."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens).view(*tokens.shape, 4, 2, 2).permute(3, 1, 4, 0, 2)


class Solid(nn.Module):
    """A convolution over permuted volumes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv3d(LENGTH, LENGTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        assert not x.is_contiguous()
        return x + torch.tanh(self.convolve(x)).transpose(3, 4).contiguous().transpose(3, 4)


class Flat(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(3, 1, 4, 0, 2).flatten(2))


def volume_layers() -> list[Any]:
    return [LayerSpec(Volumes), *(LayerSpec(Solid) for _ in range(4)), LayerSpec(Flat)]


class Shift(nn.Module):
    """Adds up its gradient, in an order that follows from how that lies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width, 1, 1))
        self.shift = nn.Parameter(torch.randn(width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        assert x.is_contiguous()
        return x * self.scale + self.shift


class ByChannels(nn.Conv2d):
    """Takes and gives tensors in the usual layout, and sends gradients back in another one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(memory_format=torch.channels_last)).relu().contiguous()


class Average(ImageHead):
    """Its gradient is one number for each image and channel, repeated."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


def shifting_layers() -> list[Any]:
    return [
        LayerSpec(ByChannels, 3, 16, 3), LayerSpec(Shift, 16), LayerSpec(ByChannels, 16, 20, 3),
        LayerSpec(Shift, 20), LayerSpec(Average, 20),
    ]


Mixed = tuple[Tensor, ...]


class Start(Embed):
    """Everything that can cross: slices, repetitions, integers, nothing, the same tensor twice, no gradient."""

    def forward(self, tokens: Tensor) -> Mixed:  # type: ignore[override]
        hidden = super().forward(tokens)
        wide = torch.cat([hidden, hidden.sin()], -1)
        keys, values = wide.tanh().chunk(2, -1)
        scale = hidden.mean((1, 2), keepdim=True).expand(-1, LENGTH, 3)
        places = torch.arange(LENGTH).expand_as(tokens)
        empty = hidden[:, :0]
        return hidden, keys, values, scale, places, (tokens > 4).t(), empty, hidden, hidden.detach().mT, wide[:, 1:, 3:]


class MixAll(nn.Module):
    """Uses everything, several times, so that gradients of many layouts are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(LENGTH, HIDDEN)
        self.up = nn.Linear(2 * HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, state: Mixed) -> Mixed:
        hidden, keys, values, scale, places, mask, empty, again, fixed, late = state
        assert again is hidden and hidden.is_contiguous() and not (keys.is_contiguous() or values.is_contiguous())
        assert scale.stride()[1:] == (0, 0) and places.stride() == (0, 1) and mask.stride() == (1, LENGTH)
        assert fixed.stride(2) == HIDDEN and not fixed.requires_grad and empty.shape[1] == 0
        assert late.storage_offset() % 16 == 3
        scores = torch.softmax(keys @ again.mT * mask.t().unsqueeze(1), -1) @ values
        update = self.up(torch.cat([hidden, scores], -1)) + self.places(places) * scale.mean(-1, keepdim=True)
        hidden = again * 0.9 + torch.tanh(update) + fixed.mT * 0.1 + empty.sum()
        keys, values, _ = self.out(hidden).chunk(3, -1)
        scale = (scale[..., :1] + late.mean()).mean(1, keepdim=True).expand(-1, LENGTH, 3)
        wide = torch.cat([keys, values], -1) + hidden.repeat(1, 1, 2)
        return hidden, keys, values, scale, places, mask, empty, hidden, fixed, wide[:, 1:, 3:]


class Finish(Head):
    """Leaves out one tensor altogether; its sums give gradients that are one number, repeated."""

    def forward(self, state: Mixed) -> Tensor:  # type: ignore[override]
        hidden, keys, _, scale, _, _, _, again, _, late = state
        return super().forward(hidden) + (again + keys).sum() * 0.01 + scale.mean() + late.mean()


def mixed_layers() -> list[Any]:
    return [LayerSpec(Start), *(LayerSpec(MixAll) for _ in range(4)), LayerSpec(Finish)]


LAYOUTS = {
    "turned": case_of(turning_layers),
    "turned, checkpointed": case_of(turning_layers, arguments={"activation_checkpoint_interval": 1}),
    "gradients in other layouts": case_of(shifting_layers, batches=usual_images),
    "volumes": case_of(volume_layers),
    "mixed": case_of(mixed_layers),
    "mixed zero1": case_of(mixed_layers, config={**ADAMW, **ZERO, **CLIP}),
    "mixed bf16": case_of(mixed_layers, config={**ADAMW, **BF16_FP32_SUMS, **CLIP}),
}


@pytest.mark.parametrize(
    ("name", "num_stages"),
    mostly(product(LAYOUTS, [2, 3, 4]), [("gradients in other layouts", 2), ("mixed", 3)]),
)
def test_other_layouts(name: str, num_stages: int) -> None:
    compare_with_undivided(LAYOUTS[name], num_stages)


# -- layouts that change from micro-batch to micro-batch --------------------------------------


def turned(x: Tensor) -> Tensor:
    """The same values, in another order in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


class Alternating(Block):
    """Gives every second micro-batch another layout."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return turned(y) if self.calls % 2 else y


class AlternatingBack(Block):
    """Sends every second gradient back in another layout."""

    def forward(self, x: Tensor) -> Tensor:
        if self.calls % 2 and x.requires_grad:
            x.register_hook(turned)
        return super().forward(x)


class Growing(Block):
    """Makes every second micro-batch longer."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return torch.cat([y, y], 1) if self.calls % 2 else y


class Shorten(Head):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :LENGTH])


class SometimesUsed(Block):
    """Passes a second tensor on and uses it in every second micro-batch only, the first time in the second one."""

    def forward(self, state: Any) -> Any:
        x, second = state if isinstance(state, tuple) else (state, state.cos())
        y = super().forward(x)
        return (y + second.sin() if self.calls % 2 == 0 else y), second


class First(Head):
    def forward(self, state: Any) -> Tensor:
        return super().forward(state[0])


def alternating_layers() -> list[Any]:
    kinds = (Alternating, AlternatingBack, Block, Alternating)
    return [LayerSpec(Embed), *map(LayerSpec, kinds), LayerSpec(Head)]


def sometimes_layers() -> list[Any]:
    return [LayerSpec(Embed), *(LayerSpec(SometimesUsed) for _ in range(4)), LayerSpec(First)]


@pytest.mark.parametrize("num_stages", mostly([2, 3, 4], [2]))
def test_layouts_and_shapes_that_change_with_dynamic_shape(num_stages: int) -> None:
    case = case_of(alternating_layers, arguments={"dynamic_shape": True}, batches=changing_lengths)
    compare_with_undivided(case, num_stages)


@pytest.mark.parametrize("optimizer", mostly(["adamw", "zero1", "bf16"], []))
def test_a_tensor_that_is_used_in_some_micro_batches_only(optimizer: str) -> None:
    case = replace(case_of(sometimes_layers), config=CONVOLVING[optimizer].config)
    compare_with_undivided(case, 3)


def evaluate_each(_rank: int, cases: list[Case]) -> list[float]:
    return [float(make(case).eval_batch(data(0, 4))) for case in cases]


def test_evaluation_needs_no_dynamic_shape() -> None:
    whole = case_of(alternating_layers)
    expected = run_ranks(evaluate_each, 1, [whole])[0]
    found = run_ranks(evaluate_each, 2, [replace(whole, num_stages=2, first=cut) for cut in cuts(6, 2)])
    assert {*found[0], *found[1]} == {*expected}


CHANGES: dict[type, str] = {
    Alternating: (
        r"stage 1 puts out was float32 \[2, 6, 16\] with strides \[16, 32, 1\] that wants a gradient in the first "
        r"micro-batch of the batch and is float32 \[2, 6, 16\] with strides \[96, 16, 1\]"
    ),
    AlternatingBack: (
        r"the gradient that stage 1 sends back was float32 \[2, 6, 16\] with strides \[96, 16, 1\] in the first .* is "
        r"float32 \[2, 6, 16\] with strides \[16, 32, 1\] in a later"
    ),
    Growing: r"stage 1 puts out was float32 \[2, 12, 16\].* and is float32 \[2, 6, 16\]",
}


def refused(_rank: int) -> None:
    for kind, message in CHANGES.items():
        layers = [LayerSpec(Embed), LayerSpec(kind), LayerSpec(Block), LayerSpec(Shorten)]
        engine = make(Case(lambda layers=layers: layers, 3, (0, 1, 2, 4), {}))
        before = [parameter.clone() for parameter in engine.module.parameters()]
        with pytest.raises(ValueError, match=rf"^rank 1: ValueError: .*{message}.*dynamic_shape=True"):
            engine.train_batch(data(0, 4))
        assert all(torch.equal(a, b) for a, b in zip(before, engine.module.parameters(), strict=True))


def test_layouts_and_shapes_that_change_are_refused_on_every_rank() -> None:
    run_ranks(refused, 3)
