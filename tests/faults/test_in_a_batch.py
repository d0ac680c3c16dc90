"""In the middle of a batch something raises on one rank, or a rank is lost: every rank says so within seconds.

Of a batch in which something raised nothing is left: the script tries the same micro-batches once more, and has the
bits of a run without the fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dynpipe_ds.host.order import ONE_F_ONE_B, OrderFor
from dynpipe_ds.host.passing import BatchRefused
from dynpipe_ds.planning import plan_order
from dynpipe_ds.ranks.fatal import RankLostError
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import Workload
from tests.distributed.configs import ADAMW, BF16, BF16_FP32_SUMS, CLIP, FP16, ZERO
from tests.distributed.models import Block, Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.faults.points import kill
from tests.matrix import mostly
from tests.messages.fabric import planned

MICRO_BATCHES = 6
BATCHES = 4


ORDERS: dict[str, OrderFor] = {"1f1b": ONE_F_ONE_B, "planned": planned}


# -- where it raises ------------------------------------------------------------------------------


def out_of_memory(*_: Any) -> None:
    raise torch.OutOfMemoryError("no room on this device")


@contextmanager
def in_layers(call: int, then: Callable[[Tensor], Any], *, with_graph: bool = False) -> Iterator[None]:
    """Do something with what a layer puts out in the n-th forward here, of all or of those that make a graph; once."""
    original, calls = Block.forward, iter(range(1, 10**6))

    def forward(self: Any, x: Tensor) -> Tensor:
        out = original(self, x)
        if (out.requires_grad or not with_graph) and next(calls) == call:
            then(out)
        return out

    with patch.object(Block, "forward", forward):
        yield


def in_backward(call: int, action: Callable[..., None] = out_of_memory) -> AbstractContextManager[None]:
    """Do something when the gradient of what a layer puts out is there."""
    return in_layers(call, lambda out: out.register_hook(lambda _: action()), with_graph=True)


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
    "a backward of the first stage": Fault(0, lambda: in_backward(3)),
    "a backward of the last stage": Fault(-1, lambda: in_backward(3)),
    "a backward in the middle": Fault(1, lambda: in_backward(2)),
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
            began, streams = time.monotonic(), torch.get_rng_state()
            with found.around() if fails else nullcontext(), pytest.raises(BatchRefused) as caught:
                run_batch(given)
            text, took_s = str(caught.value), time.monotonic() - began
            assert isinstance(caught.value.__cause__, torch.OutOfMemoryError if fails else type(None))
            assert torch.equal(torch.get_rng_state(), streams)
            if not engine.dynamic.pipeline.reading.is_here:
                engine.dynamic.pipeline.reading.behind.catch_up(given)
                assert not list(given), "other stages have read all of it"
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
    assert found[0][2].startswith(f"rank {victim}: OutOfMemoryError: no room on this device; the batch was dropped on")


def a_run(num_stages: int, **kwargs: Any) -> Run:
    return Run(num_stages, BATCHES, dropout=0.1, micro_batches=MICRO_BATCHES, **kwargs)


CASES = {
    f"{fault}, {order}, {num_ranks} ranks": (num_ranks, order, fault)
    for fault in FAULTS for order in ORDERS for num_ranks in (2, 3, 4)
}
TYPICAL = {
    "a forward of the first stage, planned, 3 ranks", "data of the last stage, 1f1b, 2 ranks",
    "a forward of the last stage in evaluation, 1f1b, 3 ranks",
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


# -- at once --------------------------------------------------------------------------------------

SLOW_S, MANY = 0.1, 30
"""Seconds of a block's forward, and micro-batches: a whole batch takes 6 s or more."""
FEW = 30
"""Forwards of blocks; a rank with two or three blocks that goes on computes more after the fault."""


def in_memory_of_1f1b(num_micro_batches: int, num_stages: int) -> Order:
    """A planned order as training runs them: with more memory, stages run far ahead of who could tell them anything."""
    s = [1.0] * num_stages
    workload = Workload(s, [2.0] * num_stages, num_micro_batches, weight_s=s, activation_bytes=[1] * num_stages)
    return plan_order(workload).order


def raising_at(note: str) -> Callable[..., None]:
    def run(*_: Any) -> None:
        Path(note).write_text(str(time.time()))
        out_of_memory()

    return run


def in_a_slow_batch(rank: int, victim: int, order: str, is_backward: bool, note: str) -> list[float]:
    """When this rank began each of its forwards of a block."""
    began: list[float] = []

    def slow() -> None:
        began.append(time.time())
        time.sleep(SLOW_S)

    engine = make_engine(Run(3, micro_batches=MANY, first=(0, 2, 5, 8)))
    engine.dynamic.pipeline.order_for = in_memory_of_1f1b if order == "planned" else ORDERS[order]
    then = raising_at(note)
    fault = in_backward(7, then) if is_backward else in_layers(7, then)
    refused = pytest.raises(BatchRefused, match=f"rank {victim}: OutOf")
    with in_every_forward(slow), fault if rank == victim else nullcontext(), refused:
        engine.train_batch(data(0, MANY))
    return began


@contextmanager
def in_every_forward(action: Callable[[], object]) -> Iterator[None]:
    original = Block.forward

    def forward(self: Any, x: Tensor) -> Tensor:
        action()
        return original(self, x)

    with patch.object(Block, "forward", forward):
        yield


@pytest.mark.parametrize(("victim", "order", "is_backward"), [
    (0, "planned", False),
    *(pytest.param(v, o, b, marks=pytest.mark.exhaustive) for v, o, b in [
        (0, "1f1b", False), (0, "1f1b", True), (1, "1f1b", True), (2, "planned", False), (2, "1f1b", True),
    ]),
])  # fmt: skip
def test_nobody_computes_the_rest_of_a_dropped_batch(
    victim: int, order: str, is_backward: bool, tmp_path: Path
) -> None:
    forwards = run_ranks(in_a_slow_batch, 3, victim, order, is_backward, str(tmp_path / "note"))
    raised_at = float((tmp_path / "note").read_text())
    after = [sum(at > raised_at for at in began) for began in forwards]
    assert max(after) < FEW, after


def losing(rank: int, num_ranks: int, victim: int, order: str, call: int, is_backward: bool, note: str) -> Any:
    """What this rank says, and when; the victim is killed in its second batch."""
    engine = make_engine(Run(num_ranks, micro_batches=MICRO_BATCHES))
    engine.dynamic.pipeline.order_for = ORDERS[order]
    batches = data(0, MICRO_BATCHES)
    engine.train_batch(batches)
    end = partial(kill, note)
    fault = in_backward(call, end) if is_backward else in_layers(call, lambda _: end())
    with fault if rank == victim else nullcontext(), pytest.raises(RankLostError) as caught:
        while True:
            engine.train_batch(batches)
    return str(caught.value), time.time()


@pytest.mark.parametrize(("num_ranks", "victim", "order", "call", "is_backward"), [
    (3, 1, "planned", 5, True),
    *(pytest.param(n, v, o, 1 + (3 * v + n) % 6, b, marks=pytest.mark.exhaustive)
      for n in (2, 3, 4) for v in range(n) for o in ORDERS for b in (False, True)),
])  # fmt: skip
def test_a_rank_lost_in_the_middle_is_named(
    num_ranks: int, victim: int, order: str, call: int, is_backward: bool, tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    note = str(tmp_path / "note")
    found = run_ranks(losing, num_ranks, num_ranks, victim, order, call, is_backward, note, may_die={victim})
    assert found[victim] is None
    others = [answer for answer in found if answer is not None]
    assert all(text.startswith(f"rank {victim} ended while batch 1 was trained") for text, _ in others)
    took_s = max(at for _, at in others) - float(Path(note).read_text())
    record_property("took_s", round(took_s, 2))
    assert took_s < 10.0
