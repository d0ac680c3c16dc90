"""What a stage computes in which part of a backward, and that collectives inside layers run once, in B."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dynpipe_ds import DynamicPipelineModule
from dynpipe_ds.host import halves
from dynpipe_ds.host.order import ONE_F_ONE_B, OrderFor
from tests.distributed.configs import ADAMW, BY_HAND, CLIP
from tests.distributed.models import Run, data, digest
from tests.distributed.ranks import run_ranks
from tests.distributed.splitting import Planned, delayed, order_for_of, train_by

WIDTH, MICRO_BATCHES = 8, 4


class Trained(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


class Frozen(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


def loss_fn(x: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(x, target)


def make_engine(layers: list[type[nn.Module]], order_for: OrderFor) -> Any:
    torch.manual_seed(5)
    module = DynamicPipelineModule(
        [LayerSpec(layer) for layer in layers], num_stages=2, loss_fn=loss_fn, partition_method="uniform"
    )
    config = {
        **ADAMW, **CLIP, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO_BATCHES,
        "steps_per_print": 10**9, "dynamic_pipeline": BY_HAND,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=module, config=config)
    engine.dynamic.pipeline.order_for = order_for
    return engine


def batches(seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(2, WIDTH, generator=draw), torch.randn(2, WIDTH, generator=draw)


# -- products ---------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts matrix products by the part of a backward in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.part = ""

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operation, and run it."""
        if func is torch.ops.aten.mm.default and self.part:
            self.counts[self.part] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count for a part, also inside of another one."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before


@contextmanager
def counting() -> Iterator[Products]:
    """Inside, count what the two halves and whole backwards compute."""
    products, first, whole = Products(), halves.backward_inputs, halves._run_whole
    second, of_loss = halves.ParameterHalf.run, PipelineEngine._exec_backward_pass

    def run_first(*args: Any) -> Any:
        with products.within("B"):
            return first(*args)

    def run_second(self: Any, *args: Any) -> Any:
        with products.within("W"):
            return second(self, *args)

    def run_whole(*args: Any) -> None:
        with products.within("whole"):
            whole(*args)

    def run_of_loss(*args: Any) -> None:
        with products.within("whole"):
            of_loss(*args)

    with (
        patch.object(halves, "backward_inputs", run_first), patch.object(halves.ParameterHalf, "run", run_second),
        patch.object(halves, "_run_whole", run_whole),
        patch.object(PipelineEngine, "_exec_backward_pass", run_of_loss), products,
    ):
        yield products


T, F = Trained, Frozen
CASES: dict[str, tuple[list[type[nn.Module]], list[dict[str, int]]]] = {
    # of one micro-batch; a whole backward computes no gradient of the first layer's input
    "all trained": ([T, T, T, T, T, T], [{"whole": 5}, {"B": 3, "W": 3}]),
    "frozen prefix is a stage": ([F, F, F, T, T, T], [{}, {"whole": 5}]),
    "frozen prefix ends in a stage": ([F, F, F, F, T, T], [{}, {"whole": 3}]),
    "frozen middle": ([T, T, T, T, F, T], [{"whole": 5}, {"B": 3, "W": 2}]),
    "frozen middle is a stage": ([T, T, T, F, F, F], [{"whole": 5}, {"whole": 3}]),
}


def count_products(_rank: int) -> dict[str, Counter[str]]:
    found = {}
    for case, (layers, _) in CASES.items():
        engine = make_engine(layers, delayed(2))
        engine.profiling = False  # the first batch's activations are counted, with hooks in between
        with counting() as products:
            engine.train_batch(batches(1))
        found[case] = products.counts
    return found


def test_what_is_frozen_or_comes_first_has_no_part_in_vain() -> None:
    """A frozen prefix has neither B nor W, a frozen middle no W, and the first layers that train no B."""
    for stage, found in enumerate(run_ranks(count_products, 2)):
        for case, (_, expected) in CASES.items():
            assert found[case] == {part: MICRO_BATCHES * count for part, count in expected[stage].items()}, case


# -- collectives inside layers ----------------------------------------------------------------


class Summed(torch.autograd.Function):
    """Sums its gradient over the replicas, and notes when."""

    noted: list[tuple[str, str, bool]] = []
    group: Any = None
    in_second_half = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = gradient.clone()
        dist.all_reduce(total, group=Summed.group)
        Summed.noted.append((ctx.name, total.numpy().tobytes().hex(), Summed.in_second_half))
        return total, None


class Summing(nn.Module):
    """One collective on the way to its parameter, one on the way to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        gain: Tensor = Summed.apply(self.gain, "gain")  # type: ignore[no-untyped-call]
        passed: Tensor = Summed.apply(torch.tanh(self.linear(x @ gain)), "passed")  # type: ignore[no-untyped-call]
        return passed


@contextmanager
def noting() -> Iterator[list[tuple[str, str, bool]]]:
    """Inside, collectives are noted; the last field says whether in W."""
    second = halves.ParameterHalf.run
    Summed.noted = []

    def run_second(self: Any, *args: Any) -> Any:
        Summed.in_second_half = True
        try:
            return second(self, *args)
        finally:
            Summed.in_second_half = False

    with patch.object(halves.ParameterHalf, "run", run_second):
        yield Summed.noted


def train_summing(_rank: int) -> list[Any]:
    found = []
    for way in (None, 1, "planned"):
        engine = make_engine([Summing] * 4, order_for_of(way))
        Summed.group = engine.grid.get_data_parallel_group()
        with noting() as noted:
            stream = batches(engine.grid.get_data_parallel_id())
            losses = [float(engine.train_batch(stream)) for _ in range(2)]
        found.append((losses, digest(engine), list(noted)))
    return found


def test_collectives_inside_layers_run_once_in_one_order() -> None:
    """On two replicas: the same ones in the same order, each with the sum of both, and none of them in W."""
    ranks = run_ranks(train_summing, 4)
    for replica, other in (ranks[0:2], ranks[2:4]):
        for mine, theirs in zip(replica, other, strict=True):
            assert mine[2] == theirs[2] and len(mine[2]) == 2 * MICRO_BATCHES * 2 * 2
            assert not any(in_second_half for *_, in_second_half in mine[2])
    for plain, *others in ranks:
        for losses, weights, noted in others:
            assert (losses, weights) == plain[:2] and sorted(noted) == sorted(plain[2])


# -- a client's own forward pass --------------------------------------------------------------


def own_forward(engine: Any, buffer_id: int) -> None:
    """Copies what was received by itself."""
    received = engine.pipe_buffers["inputs"][buffer_id]
    own_forward.num_calls += 1  # type: ignore[attr-defined]
    engine.pipe_buffers["outputs"][buffer_id] = output = super(PipelineEngine, engine).forward(received.clone())
    if engine.is_last_stage():
        engine.loss = engine.module.loss_fn(output, engine.pipe_buffers["labels"][buffer_id])
        engine.fwd_outputs.append(engine.loss.detach())
        engine.total_loss = engine.loss.detach().clone() + (engine.total_loss if engine.total_loss is not None else 0.0)


def train_with_own_forward(_rank: int, run: Run) -> list[Any]:
    PipelineEngine._INSTRUCTION_MAP[schedule.ForwardPass] = own_forward
    found = []
    for order_for in (ONE_F_ONE_B, delayed(1), Planned()):
        own_forward.num_calls = 0  # type: ignore[attr-defined]
        evaluated: list[float] = []

        def evaluate(engine: Any, batch: int, evaluated: list[float] = evaluated) -> None:
            if batch == 2:
                evaluated.append(float(engine.eval_batch(data(3, run.micro_batches))))

        seen = train_by(run, order_for, evaluate)
        found.append((seen.bits, evaluated, own_forward.num_calls, seen.num_split))  # type: ignore[attr-defined]
    return found


def test_a_forward_pass_of_the_clients_own() -> None:
    run = Run(2, 4, config={**ADAMW, **CLIP}, moves={1: (0, 2, 8)})
    for stage, (plain, *others) in enumerate(run_ranks(train_with_own_forward, 2, run)):
        assert plain[2] == 5 * run.micro_batches and plain[3] == 0
        for other in others:
            assert other[:3] == plain[:3] and bool(other[3]) == bool(stage)
