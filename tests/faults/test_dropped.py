"""A batch in whose middle something raises on one rank: every rank says so within seconds, and nothing of it is left.

The script tries the same micro-batches once more, and has the bits of a run without the fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dynpipe_ds.host.order import ONE_F_ONE_B, OrderFor
from dynpipe_ds.host.passing import BatchRefused
from dynpipe_ds.planning import plan_order
from dynpipe_ds.schedule import Op, Order
from dynpipe_ds.simulation import Workload
from tests.distributed import models
from tests.distributed.configs import ADAMW, BF16, BF16_FP32_SUMS, CLIP, FP16, ZERO
from tests.distributed.models import Block, Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

MICRO_BATCHES = 6
BATCHES = 4


def planned(num_micro_batches: int, num_stages: int) -> Order:
    """An order with W, as it would be for equal stages."""
    order = plan_order(Workload([1.0] * num_stages, [2.0] * num_stages, num_micro_batches, weight_s=[1.0] * num_stages))
    assert any(one.op is Op.BACKWARD_WEIGHT for one in order.order.stages[-1])
    return order.order


ORDERS: dict[str, OrderFor] = {"1f1b": ONE_F_ONE_B, "planned": planned}


# -- where it raises ------------------------------------------------------------------------------


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no room on this device")


@contextmanager
def in_layers(call: int, then: Callable[[Tensor], Any]) -> Iterator[None]:
    """Do something with what a layer puts out in its n-th forward here, once."""
    original, calls = Block.forward, iter(range(1, 10**6))

    def forward(self: Any, x: Tensor) -> Tensor:
        out = original(self, x)
        if next(calls) == call:
            then(out)
        return out

    with patch.object(Block, "forward", forward):
        yield


def in_backward(out: Tensor) -> None:
    out.register_hook(out_of_memory)


class _Raising(torch.autograd.Function):
    """A sum that can't be computed."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        out_of_memory()
        return gradient


@contextmanager
def in_loss(call: int) -> Iterator[None]:
    """The backward of the n-th loss raises."""
    original, calls = models.loss_fn, iter(range(1, 10**6))

    def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
        return original(_Raising.apply(logits) if next(calls) == call else logits, labels)  # type: ignore[no-untyped-call]

    with patch.object(models, "loss_fn", loss_fn):
        yield


class Failing:
    """Micro-batches, of which one can't be read."""

    def __init__(self, batches: Sequence[Any], number: int) -> None:
        self._batches, self._number, self._next = batches, number, 0

    def __iter__(self) -> Failing:
        return self

    def __next__(self) -> Any:
        self._next += 1
        if self._next - 1 == self._number:
            out_of_memory()
        return self._batches[self._next - 1]


@dataclass(frozen=True)
class Fault:
    """What raises on one rank.

    Attributes:
        victim: of the ranks; counted from the last one if negative.
        around: is around the batch there.
        data: number of the micro-batch that can't be read.
        evaluates: whether the batch is evaluated.
    """

    victim: int
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    data: int | None = None
    evaluates: bool = False


FAULTS = {
    "the first forward": Fault(0, lambda: in_layers(1, out_of_memory)),
    "a forward of the first stage": Fault(0, lambda: in_layers(4, out_of_memory)),
    "a forward of the last stage": Fault(-1, lambda: in_layers(4, out_of_memory)),
    "a forward in the middle": Fault(1, lambda: in_layers(5, out_of_memory)),
    "a backward of the first stage": Fault(0, lambda: in_layers(3, in_backward)),
    "a backward of the last stage": Fault(-1, lambda: in_layers(3, in_backward)),
    "a backward in the middle": Fault(1, lambda: in_layers(2, in_backward)),
    "data of the first stage": Fault(0, data=3),
    "data of the last stage": Fault(-1, data=2),
    "a forward of the last stage in evaluation": Fault(-1, lambda: in_layers(4, out_of_memory), evaluates=True),
    "data of the first stage in evaluation": Fault(0, data=3, evaluates=True),
}


# -- the same bits --------------------------------------------------------------------------------


def trained(rank: int, run: Run, order: str, fault: str | None) -> tuple[list[float], dict[str, str], str, float]:
    """Losses, state, message and the seconds that the batch took which is tried twice: the third one."""
    engine, losses, text, took_s = make_engine(run), [], "", 0.0
    engine.dynamic.pipeline.order_for = ORDERS[order]
    batches = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    for batch in range(run.num_batches):
        micro_batches = [next(batches) for _ in range(run.micro_batches)]
        if batch == 2 and fault is not None:
            found = FAULTS[fault]
            fails = rank == found.victim % torch.distributed.get_world_size()
            given = Failing(micro_batches, found.data) if fails and found.data is not None else iter(micro_batches)
            run_batch = engine.eval_batch if found.evaluates else engine.train_batch
            began = time.monotonic()
            with found.around() if fails else nullcontext(), pytest.raises(BatchRefused) as caught:
                run_batch(given)
            text, took_s = str(caught.value), time.monotonic() - began
            assert isinstance(caught.value.__cause__, torch.OutOfMemoryError if fails else type(None))
        losses.append(float(engine.train_batch(iter(micro_batches))))
    for module in engine.local_layers().values():
        if isinstance(module, Block):
            module.calls.zero_()  # it counts forwards, those of the dropped batch as well
    return losses, digest(engine), text, took_s


def compare(run: Run, num_ranks: int, order: str, fault: str) -> None:
    found, plain = run_ranks(trained, num_ranks, run, order, fault), run_ranks(trained, num_ranks, run, order, None)
    assert [rank[:2] for rank in found] == [rank[:2] for rank in plain]
    assert len({text for *_, text, _ in found}) == 1, "one message, the same on every rank"
    victim = FAULTS[fault].victim % num_ranks
    assert f"(rank {victim}: OutOfMemoryError: no room on this device)" in found[0][2]


def a_run(num_stages: int, **kwargs: Any) -> Run:
    return Run(num_stages, BATCHES, dropout=0.1, micro_batches=MICRO_BATCHES, **kwargs)


CASES = {
    f"{fault}, {order}, {num_ranks} ranks": (num_ranks, order, fault)
    for fault in FAULTS for order in ORDERS for num_ranks in (2, 3, 4)
}
TYPICAL = {
    "a forward of the first stage, planned, 3 ranks", "a backward of the last stage, planned, 4 ranks",
    "data of the last stage, 1f1b, 2 ranks", "a forward of the last stage in evaluation, 1f1b, 3 ranks",
}


@pytest.mark.parametrize("case", mostly(CASES, TYPICAL))
def test_the_next_batch_has_the_same_bits(case: str) -> None:
    num_ranks, order, fault = CASES[case]
    compare(a_run(num_ranks), num_ranks, order, fault)


CONFIGS: dict[str, Run] = {
    "tied, clipped": a_run(2, tied=True, config={**ADAMW, **CLIP}),
    "zero1": a_run(2, config={**ADAMW, **ZERO}),
    "bf16": a_run(2, config={**ADAMW, **BF16}),
    "bf16 immediate": a_run(2, config={**ADAMW, "bf16": {"enabled": True, "immediate_grad_update": True}}),
    "bf16 + zero1": a_run(2, config={**ADAMW, **BF16_FP32_SUMS}),
    "fp16 + zero1": a_run(2, config={**ADAMW, **ZERO, **FP16}),
    "checkpointing": a_run(2, checkpoint_interval=1),
}
HARD = ["a backward of the first stage", "a forward of the last stage"]
IN_CONFIGS = {
    f"{name}, {fault}, {num_ranks} ranks": (run, num_ranks, fault)
    for name, run in CONFIGS.items() for fault in HARD for num_ranks in (2, 4)
}


@pytest.mark.parametrize("case", mostly(IN_CONFIGS, ["bf16 + zero1, a backward of the first stage, 4 ranks"]))
def test_the_same_bits_in_all_configurations(case: str) -> None:
    run, num_ranks, fault = IN_CONFIGS[case]
    compare(run, num_ranks, "planned", fault)
