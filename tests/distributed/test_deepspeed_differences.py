"""Where DeepSpeed's training depends on the cut, shown next to ours, which does not.

Each test keeps a minimal reproduction of what DeepSpeed does, so that a fix there will be noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule
from tests.distributed.configs import UNCLIPPED
from tests.distributed.models import HIDDEN, Embed, Head, Run, base_config, data, layers_of, loss_fn
from tests.distributed.ranks import RankFailure, run_ranks

CUTS = ([0, 4, 8], [0, 1, 8])


def at_each(_rank: int, cuts: Sequence[list[int]], train: Callable[..., Any], *args: Any) -> list[Any]:
    """Train at one cut after the other, in one world."""
    return [train(cut, *args) for cut in cuts]


def config_of(run: Run, plain: bool) -> dict[str, Any]:
    """Without clipping unless told otherwise: DeepSpeed's depends on the cut."""
    return base_config(replace(run, plain=plain, config={**UNCLIPPED, **run.config}), 1)


def module_at(
    plain: bool, cut: list[int], layers: list[Any], loss: Callable[..., Any] = loss_fn, **arguments: Any
) -> PipelineModule:
    """A module of two stages; both classes start from the same weights."""

    class Plain(PipelineModule):  # type: ignore[misc]
        def _partition_layers(self, method: Any = None) -> None:
            self.parts = cut
            self._set_bounds(cut[self.stage_id], cut[self.stage_id + 1])

    torch.manual_seed(7)
    cls, method = (Plain, "uniform") if plain else (DynamicPipelineModule, cut)
    return cls(layers, num_stages=2, loss_fn=loss, seed_layers=True, partition_method=method, **arguments)


def losses_at_cut(cut: list[int], plain: bool, run: Run, transposed: bool = False) -> list[float]:
    """Losses of a static run at a given cut; both classes start from the same weights."""
    layers = layers_of(run)
    if transposed:
        layers = [layers[0], swap, *layers[1:-2], LayerSpec(Shift), swap, layers[-1]]
    module = module_at(
        plain, cut, layers, activation_checkpoint_interval=run.checkpoint_interval,
        checkpointable_layers=["Block"] if run.checkpoint_interval else None,
    )
    engine, *_ = deepspeed.initialize(model=module, config=config_of(run, plain))
    batches = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    return [float(engine.train_batch(batches)) for _ in range(run.num_batches)]


def swap(x: Tensor) -> Tensor:
    """Batch first to sequence first, as GPT-NeoX and Megatron-DeepSpeed keep their activations, and back."""
    return x.transpose(0, 1).contiguous()


class Mask(nn.Module):
    """A float mask that wants a gradient, as DeepSpeed asked of all float tensors, goes along with the activations."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), -1e9), 1)
        return x, mask.requires_grad_(True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, 3 * HIDDEN)

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = inputs
        q, k, v = self.linear(x).view(*x.shape[:2], 3, 2, HIDDEN // 2).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + y.transpose(1, 2).reshape(x.shape), mask


class OwnForward(schedule.BufferOpInstruction):  # type: ignore[misc]
    pass


class OwnSchedule(schedule.InferenceSchedule):  # type: ignore[misc]
    """As in qlora-pipe: a forward pass besides DeepSpeed's."""

    def steps(self) -> Any:
        for commands in super().steps():
            yield [OwnForward(c.buffer_id) if isinstance(c, schedule.ForwardPass) else c for c in commands]


def own_forward(engine: Any, buffer_id: int) -> None:
    """Copies what was received by itself."""
    received = engine.pipe_buffers["inputs"][buffer_id]
    given = tuple(t.clone() for t in received) if isinstance(received, tuple) else received.clone()
    engine.pipe_buffers["outputs"][buffer_id] = output = super(PipelineEngine, engine).forward(given)
    if engine.is_last_stage():
        engine.loss = engine.module.loss_fn(output, engine.pipe_buffers["labels"][buffer_id])
        engine.fwd_outputs.append(engine.loss)


def evaluations(cut: list[int], way: str) -> list[float]:
    """Losses of an untrained model at a given cut."""
    plain = way == "deepspeed"
    if way == "own forward":
        PipelineEngine._INSTRUCTION_MAP[schedule.ForwardPass] = own_forward
    if way == "own instruction":
        PipelineEngine._INSTRUCTION_MAP[OwnForward] = own_forward
        schedule.InferenceSchedule = OwnSchedule
    layers = [LayerSpec(Embed), LayerSpec(Mask), *[LayerSpec(Attention)] * 4, first, LayerSpec(Head)]
    module = module_at(plain, cut, layers)
    config = {**base_config(Run(num_stages=2), 1), "dynamic_pipeline": {"enabled": not plain}}
    engine, *_ = deepspeed.initialize(model=module, config=config)
    batches = data(0, 4)
    return [float(engine.eval_batch(batches)) for _ in range(8)]


def first(inputs: tuple[Tensor, Tensor]) -> Tensor:
    return inputs[0]


@pytest.mark.parametrize("way", ["deepspeed", "ours", "own forward", "own instruction"])
def test_flags_of_what_crosses_in_evaluation(way: str) -> None:
    """torch's attention chooses its kernel by whether the mask wants a gradient; DeepSpeed's copy does not want any."""
    one, other = run_ranks(at_each, 2, ([0, 3, 8], [0, 7, 8]), evaluations, way)[0]
    assert (one != other) == (way == "deepspeed")


class Shift(nn.Module):
    """Adds its bias by itself, as row-parallel layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Case(NamedTuple):
    """A run that is trained at two cuts, with both classes."""

    run: Run
    cuts: tuple[list[int], list[int]] = CUTS
    transposed: bool = False


FEW = Run(num_stages=2, num_batches=5)
LAYOUT, NEITHER, CLIPPING, DROPOUT = CASES = (
    Case(replace(FEW, num_batches=20), ([0, 8, 10], [0, 1, 10]), transposed=True),
    Case(replace(FEW, dropout=0.2)),
    Case(replace(FEW, config={"gradient_clipping": 0.05})),
    Case(replace(FEW, dropout=0.3, checkpoint_interval=1)),
)
Depends = Callable[[Case, bool], bool]


def losses_of_cases(_rank: int) -> list[list[list[list[float]]]]:
    """By case, class and cut."""
    return [
        [[losses_at_cut(cut, plain, run, transposed) for cut in cuts] for plain in (False, True)]
        for run, cuts, transposed in CASES
    ]


@pytest.fixture(scope="module")
def depends_on_cut() -> Depends:
    """Whether the losses of a case depend on the cut, with DeepSpeed's class or ours; all cases in one world."""
    found = run_ranks(losses_of_cases, 2)[0]

    def depends(case: Case, plain: bool) -> bool:
        first, second = found[CASES.index(case)][plain]
        return bool(first != second)

    return depends


@pytest.mark.parametrize(
    "plain", [pytest.param(True, id="deepspeed", marks=pytest.mark.exhaustive), pytest.param(False, id="ours")]
)
def test_the_layout_of_gradients_that_cross_a_cut(depends_on_cut: Depends, plain: bool) -> None:
    """A kernel adds up a transposed gradient in another order than a contiguous one, which DeepSpeed receives."""
    assert depends_on_cut(LAYOUT, plain) == plain


@pytest.mark.parametrize("plain", [True, False], ids=["deepspeed", "ours"])
def test_without_clipping_and_checkpointing_neither_depends(depends_on_cut: Depends, plain: bool) -> None:
    assert not depends_on_cut(NEITHER, plain)


@pytest.mark.parametrize("plain", [True, False], ids=["deepspeed", "ours"])
def test_fp32_clipping_counts_the_first_stage_only(depends_on_cut: Depends, plain: bool) -> None:
    assert depends_on_cut(CLIPPING, plain) == plain


@pytest.mark.parametrize("plain", [True, False], ids=["deepspeed", "ours"])
def test_dropout_under_activation_checkpointing(depends_on_cut: Depends, plain: bool) -> None:
    assert depends_on_cut(DROPOUT, plain) == plain


def global_norms(cut: list[int]) -> tuple[float, float]:
    """The norm the engine used in the first batch, and the same computed by hand over all stages."""
    squares = torch.zeros((), dtype=torch.float64)
    run = Run(num_stages=2, num_batches=1, config={"gradient_clipping": 1e9})
    seen: dict[str, float] = {}

    original = DeepSpeedEngine._take_model_step

    def spy(engine: Any, lr_kwargs: Any) -> None:
        for p in engine.module.parameters():
            squares.add_(p.grad.double().square().sum())
        original(engine, lr_kwargs)
        seen["norm"] = float(engine.get_global_grad_norm() or 0.0)

    with patch.object(DeepSpeedEngine, "_take_model_step", spy):
        losses_at_cut(cut, False, run)
    torch.distributed.all_reduce(squares)
    return seen["norm"], float(squares.sqrt())


def test_our_norm_is_the_norm_of_the_whole_model() -> None:
    results = run_ranks(at_each, 2, CUTS, global_norms)
    used = {norm for ranks in results for norm, _ in ranks}
    assert len(used) == 1, "one norm on all ranks, the same bits at both cuts"
    assert used.pop() == pytest.approx(results[0][0][1], rel=1e-6)


class Fork(nn.Module):
    """Gives two float outputs, both used downstream."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.linear(x)
        return torch.tanh(h), torch.sin(h)


class Join(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


LARGE_STEPS = {"optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}}}


def regression_losses(module: PipelineModule, plain: bool, micro_batches: int) -> list[float]:
    config = {"train_micro_batch_size_per_gpu": 8, **LARGE_STEPS}
    config = config_of(Run(num_stages=2, micro_batches=micro_batches, config=config), plain)
    engine, *_ = deepspeed.initialize(model=module, config=config)
    generator = torch.Generator().manual_seed(3)
    batches = iter(lambda: tuple(torch.randn(8, n, generator=generator) for n in (16, 1)), None)
    return [float(engine.train_batch(batches)) for _ in range(12)]


def fork_losses(cut: list[int], plain: bool) -> list[float]:
    layers = [LayerSpec(nn.Linear, 16, 16), LayerSpec(Fork), LayerSpec(Join), LayerSpec(nn.Linear, 16, 1)]
    module = module_at(plain, cut, layers, nn.functional.mse_loss)
    return regression_losses(module, plain, micro_batches=3)


@pytest.mark.parametrize("plain", [True, False], ids=["deepspeed", "ours"])
def test_several_outputs_across_a_cut(plain: bool) -> None:
    """DeepSpeed runs one backward an output, so sums are rounded otherwise where a cut falls there."""
    at_fork, elsewhere = run_ranks(at_each, 2, ([0, 2, 4], [0, 3, 4]), fork_losses, plain)[0]
    assert (at_fork != elsewhere) == plain


def mixed_tuple(rank: int, plain: bool) -> list[float]:
    """Stages that pass (int64, float) tuples; DeepSpeed reuses receive buffers whatever the dtype."""
    del rank
    torch.manual_seed(7)

    class Start(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(11, 16)

        def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
            h = self.embedding(tokens)
            return torch.arange(16).expand(h.shape).contiguous(), h

    class Middle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            positions, h = x
            return positions, h + self.linear(h) * positions

    def loss(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
        return outputs[1].square().mean() + 0.0 * labels.sum()

    cls = PipelineModule if plain else DynamicPipelineModule
    layers = [Start(), Middle(), Middle(), Middle()]
    module = cls(layers, num_stages=dist.get_world_size(), loss_fn=loss, partition_method="uniform")
    run = Run(dist.get_world_size(), micro_batches=3, config=LARGE_STEPS)
    engine, *_ = deepspeed.initialize(model=module, config=config_of(run, plain))
    tokens = torch.arange(12).view(2, 6) % 11
    batches = iter(lambda: (tokens, tokens), None)
    return [float(engine.train_batch(batches)) for _ in range(4)]


def mixed_tuple_both_ways(rank: int) -> tuple[list[float], list[float]]:
    return mixed_tuple(rank, True), mixed_tuple(rank, False)


def test_mixed_tuples_on_three_stages() -> None:
    right, ours = run_ranks(mixed_tuple_both_ways, 2)[0]
    assert ours == right
    assert run_ranks(mixed_tuple, 3, False)[0] == right


@pytest.mark.exhaustive  # a hang is waited for
def test_mixed_tuples_on_three_stages_of_deepspeed() -> None:
    """A middle stage receives gradients in a buffer that it made for int64: a hang or nonsense."""
    try:
        assert run_ranks(mixed_tuple, 3, True, timeout_s=60)[0] != run_ranks(mixed_tuple, 2, True)[0]
    except RankFailure:
        pass


def tied_losses(cut: list[int], plain: bool) -> list[float]:
    """A weight used by layers 0 and 2, which are on one stage or on two."""
    tied = [TiedLayerSpec("w", nn.Linear, 16, 16, tied_weight_attr="weight", bias=False) for _ in range(2)]
    layers = [tied[0], LayerSpec(nn.Tanh), tied[1], LayerSpec(nn.Linear, 16, 1)]
    module = module_at(plain, cut, layers, nn.functional.mse_loss)
    return regression_losses(module, plain, micro_batches=5)


@pytest.mark.parametrize("plain", [True, False], ids=["deepspeed", "ours"])
def test_tied_layers_on_one_stage(plain: bool) -> None:
    together, apart = run_ranks(at_each, 2, ([0, 3, 4], [0, 2, 4]), tied_losses, plain)[0]
    assert (together != apart) == plain
