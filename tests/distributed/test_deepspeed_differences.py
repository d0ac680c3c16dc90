"""Where DeepSpeed's training depends on the cut, shown next to ours, which does not.

Each test keeps a minimal reproduction of what DeepSpeed does, so that a fix there will be noticed.
"""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule
from tests.distributed.models import Run, data, layers_of, loss_fn
from tests.distributed.ranks import RankFailure, run_ranks

CUTS = ([0, 4, 8], [0, 1, 8])


def losses_at_cut(rank: int, plain: bool, cut: list[int], run: Run) -> list[float]:
    """Losses of a static run at a given cut; both classes start from the same weights."""
    del rank

    class Plain(PipelineModule):  # type: ignore[misc]
        def _partition_layers(self, method: Any = None) -> None:
            self.parts = cut
            self._set_bounds(cut[self.stage_id], cut[self.stage_id + 1])

    torch.manual_seed(7)
    cls, method = (Plain, "uniform") if plain else (DynamicPipelineModule, cut)
    module = cls(
        layers_of(run), num_stages=2, loss_fn=loss_fn, seed_layers=True, partition_method=method,
        activation_checkpoint_interval=run.checkpoint_interval,
        checkpointable_layers=["Block"] if run.checkpoint_interval else None,
    )
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": run.micro_batches,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "dynamic_pipeline": {"enabled": not plain, "rebalance_every": "never"},
        **run.config,
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    batches = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    return [float(engine.train_batch(batches)) for _ in range(run.num_batches)]


def depends_on_cut(plain: bool, run: Run) -> bool:
    first, second = (run_ranks(losses_at_cut, 2, plain, cut, run)[0] for cut in CUTS)
    return bool(first != second)


@pytest.mark.parametrize("plain", [True, False], ids=["deepspeed", "ours"])
def test_without_clipping_and_checkpointing_neither_depends(plain: bool) -> None:
    assert not depends_on_cut(plain, Run(num_stages=2, num_batches=5, dropout=0.2))


@pytest.mark.parametrize("plain", [True, False], ids=["deepspeed", "ours"])
def test_fp32_clipping_counts_the_first_stage_only(plain: bool) -> None:
    run = Run(num_stages=2, num_batches=5, config={"gradient_clipping": 0.05})
    assert depends_on_cut(plain, run) == plain


@pytest.mark.parametrize("plain", [True, False], ids=["deepspeed", "ours"])
def test_dropout_under_activation_checkpointing(plain: bool) -> None:
    run = Run(num_stages=2, num_batches=5, dropout=0.3, checkpoint_interval=1)
    assert depends_on_cut(plain, run) == plain


def global_norms(rank: int, plain: bool, cut: list[int]) -> tuple[float, float]:
    """The norm the engine used in the first batch, and the same computed by hand over all stages."""
    squares = torch.zeros((), dtype=torch.float64)
    run = Run(num_stages=2, num_batches=1, config={"gradient_clipping": 1e9})
    seen: dict[str, float] = {}

    original = deepspeed.runtime.engine.DeepSpeedEngine._take_model_step

    def spy(engine: Any, lr_kwargs: Any) -> None:
        for p in engine.module.parameters():
            squares.add_(p.grad.double().square().sum())
        original(engine, lr_kwargs)
        seen["norm"] = float(engine.get_global_grad_norm() or 0.0)

    deepspeed.runtime.engine.DeepSpeedEngine._take_model_step = spy
    losses_at_cut(rank, plain, cut, run)
    torch.distributed.all_reduce(squares)
    return seen["norm"], float(squares.sqrt())


def test_our_norm_is_the_norm_of_the_whole_model() -> None:
    results = [run_ranks(global_norms, 2, False, cut) for cut in CUTS]
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


def fork_losses(rank: int, plain: bool, cut: list[int]) -> list[float]:
    del rank

    class Plain(PipelineModule):  # type: ignore[misc]
        def _partition_layers(self, method: Any = None) -> None:
            self.parts = cut
            self._set_bounds(cut[self.stage_id], cut[self.stage_id + 1])

    torch.manual_seed(7)
    cls, method = (Plain, "uniform") if plain else (DynamicPipelineModule, cut)
    layers = [nn.Linear(16, 16), Fork(), Join(), nn.Linear(16, 1)]
    module = cls(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method=method)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 3,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # 1.0 unless told otherwise, which depends on the cut
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "dynamic_pipeline": {"enabled": not plain, "rebalance_every": "never"},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    generator = torch.Generator().manual_seed(3)
    batches = iter(lambda: tuple(torch.randn(8, n, generator=generator) for n in (16, 1)), None)
    return [float(engine.train_batch(batches)) for _ in range(12)]


@pytest.mark.parametrize("plain", [True, False], ids=["deepspeed", "ours"])
def test_several_outputs_across_a_cut(plain: bool) -> None:
    """DeepSpeed runs one backward an output, so sums are rounded otherwise where a cut falls there."""
    at_fork, elsewhere = (run_ranks(fork_losses, 2, plain, cut)[0] for cut in ([0, 2, 4], [0, 3, 4]))
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
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3, "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # 1.0 unless told otherwise, which depends on the cut
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "dynamic_pipeline": {"enabled": not plain, "rebalance_every": "never"},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    tokens = torch.arange(12).view(2, 6) % 11
    batches = iter(lambda: (tokens, tokens), None)
    return [float(engine.train_batch(batches)) for _ in range(4)]


def test_mixed_tuples_on_three_stages() -> None:
    right = run_ranks(mixed_tuple, 2, True)[0]
    assert run_ranks(mixed_tuple, 2, False)[0] == right
    assert run_ranks(mixed_tuple, 3, False)[0] == right


@pytest.mark.exhaustive  # a hang is waited for
def test_mixed_tuples_on_three_stages_of_deepspeed() -> None:
    """A middle stage receives gradients in a buffer that it made for int64: a hang or nonsense."""
    try:
        assert run_ranks(mixed_tuple, 3, True, timeout_s=60)[0] != run_ranks(mixed_tuple, 2, True)[0]
    except RankFailure:
        pass


def tied_losses(rank: int, plain: bool, cut: list[int]) -> list[float]:
    """A weight used by layers 0 and 2, which are on one stage or on two."""
    del rank

    class Plain(PipelineModule):  # type: ignore[misc]
        def _partition_layers(self, method: Any = None) -> None:
            self.parts = cut
            self._set_bounds(cut[self.stage_id], cut[self.stage_id + 1])

    torch.manual_seed(7)
    cls, method = (Plain, "uniform") if plain else (DynamicPipelineModule, cut)
    tied = [TiedLayerSpec("w", nn.Linear, 16, 16, tied_weight_attr="weight", bias=False) for _ in range(2)]
    layers = [tied[0], nn.Tanh(), tied[1], nn.Linear(16, 1)]
    module = cls(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method=method)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 5,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # 1.0 unless told otherwise, which depends on the cut
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
        "dynamic_pipeline": {"enabled": not plain, "rebalance_every": "never"},
    }
    engine, *_ = deepspeed.initialize(model=module, config=config)
    generator = torch.Generator().manual_seed(3)
    batches = iter(lambda: tuple(torch.randn(8, n, generator=generator) for n in (16, 1)), None)
    return [float(engine.train_batch(batches)) for _ in range(12)]


@pytest.mark.parametrize("plain", [True, False], ids=["deepspeed", "ours"])
def test_tied_layers_on_one_stage(plain: bool) -> None:
    together, apart = (run_ranks(tied_losses, 2, plain, cut)[0] for cut in ([0, 3, 4], [0, 2, 4]))
    assert (together != apart) == plain
