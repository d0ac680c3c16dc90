"""Messages that nobody waits for: the same bits at whatever moment they come, and no batch goes on with a wrong one."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest

from dynpipe_ds.host import order as planning
from dynpipe_ds.host.order import OrderFor
from dynpipe_ds.host.passing import BatchRefused
from dynpipe_ds.host.wires import TorchWire
from dynpipe_ds.messages.channels import Channels, Stamp, UnfinishedBatchError
from dynpipe_ds.messages.traffic import Kind, Message
from dynpipe_ds.schedule import Order, order_of
from tests.distributed.configs import MOVES
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.messages.fabric import planned

DELAY_S = 2e-3
BATCHES = 4
PLANNED = planning.OrderSchedule


def other_order(change: Any) -> AbstractContextManager[Any]:
    """Let this rank run another order than planned."""
    return patch.object(planning, "OrderSchedule", lambda order, stage: PLANNED(change(order), stage))


def gpipe(order: Order) -> Order:
    return order_of("gpipe", order.num_micro_batches, order.num_stages)


@contextmanager
def at_random_moments(rank: int) -> Iterator[None]:
    """Whoever posts a message, or is to begin something, dawdles at times."""
    draw, originals = random.Random(rank), (TorchWire.send, TorchWire.receive, Channels.turn)

    def late(original: Any) -> Any:
        def run(*args: Any) -> Any:
            time.sleep(DELAY_S * draw.random() * (draw.random() < 0.3))
            return original(*args)

        return run

    with (
        patch.object(TorchWire, "send", late(originals[0])), patch.object(TorchWire, "receive", late(originals[1])),
        patch.object(Channels, "turn", late(originals[2])),
    ):
        yield


def checked_step(engine: Any) -> None:
    """At the optimizer's step nothing is under way any more."""
    channels = engine.dynamic.pipeline.channels

    def check(*_: Any) -> None:
        assert all(out.num_under_way == 0 for out in channels.out.values())
        assert all(into.is_idle for into in channels.into.values())

    engine.optimizer.register_step_pre_hook(check)


def trained(rank: int, run: Run, is_late: bool, is_dynamic: bool, order: OrderFor = planning.ONE_F_ONE_B) -> Any:
    engine = make_engine(run, dynamic_shape=is_dynamic)
    engine.dynamic.pipeline.order_for = order
    checked_step(engine)
    batches, losses = data(engine.grid.get_data_parallel_id(), run.micro_batches), []
    with at_random_moments(rank) if is_late else nullcontext():
        for batch in range(run.num_batches):
            if batch in run.moves:
                engine.repartition(run.moves[batch])
            losses.append(float(engine.train_batch(batches)))
            losses.append(float(engine.eval_batch(batches)))
    return losses, digest(engine)


def as_without(rank: int, run: Run, is_dynamic: bool) -> None:
    usual = trained(rank, run, False, False)
    assert trained(rank, run, True, is_dynamic) == usual
    assert trained(rank, run, True, is_dynamic, planned) == usual


@pytest.mark.parametrize(("num_stages", "num_ranks", "is_dynamic"), [
    (2, 2, False), (3, 3, True),
    *(pytest.param(s, n, d, marks=pytest.mark.exhaustive)
      for s, n, d in [(2, 2, True), (2, 4, False), (3, 3, False), (4, 4, True), (6, 6, False), (8, 8, True)]),
])  # fmt: skip
def test_the_bits_do_not_depend_on_when_messages_come(num_stages: int, num_ranks: int, is_dynamic: bool) -> None:
    run = Run(num_stages, BATCHES, dropout=0.1, tied=True, moves=MOVES.get(num_stages, {}), micro_batches=5)
    run_ranks(as_without, num_ranks, run, is_dynamic)


# -- batches that fail ----------------------------------------------------------------------------


def mislabelled(self: Stamp, message: Message) -> bytes:
    if message.micro_batch == 1:
        message = Message(Kind.GRADIENT, 3)
    return LABEL(self, message)


LABEL = Stamp.label
FAULTS: dict[str, tuple[AbstractContextManager[Any], str]] = {
    "label": (patch.object(Stamp, "label", mislabelled), "from stage 0 to stage 1 the gradient of micro-batch 3 came"),
    "order": (other_order(gpipe), "the ranks disagree on the order of a batch (a digest of it, stages, boundaries): "),
}


def with_fault(rank: int, run: Run, name: str | None) -> Any:
    """Train; the second batch is tried once more if something is wrong with the first rank's messages."""
    engine, losses, text = make_engine(run), [], ""
    batches = data(0, run.micro_batches)
    for batch in range(run.num_batches):
        micro_batches = [next(batches) for _ in range(run.micro_batches)]
        if batch == 1 and name is not None:
            fault = FAULTS[name][0] if rank == 0 else nullcontext()
            with fault, pytest.raises(BatchRefused) as caught:
                engine.train_batch(iter(micro_batches))
            text = str(caught.value)
        losses.append(float(engine.train_batch(iter(micro_batches))))
    weights = {name: weight.detach().numpy().tobytes() for name, weight in engine.module.named_parameters()}
    return (losses, weights), text  # not buffers: they count forwards, those of the refused batch as well


@pytest.mark.parametrize("name", list(FAULTS))
def test_after_a_refused_batch_training_goes_on_with_the_same_bits(name: str) -> None:
    run = Run(3, 3, micro_batches=4)
    found, plain = run_ranks(with_fault, 3, run, name), run_ranks(with_fault, 3, run, None)
    assert [bits for bits, _ in found] == [bits for bits, _ in plain]
    assert len({text for _, text in found}) == 1 and FAULTS[name][1] in found[0][1]


def interrupted(batches: list[Any]) -> Iterator[Any]:
    yield from batches
    raise KeyboardInterrupt


def ended_in_the_middle(rank: int, run: Run) -> None:
    engine = make_engine(run)
    with pytest.raises(KeyboardInterrupt):  # the first stage has sent one micro-batch, the last one has taken it
        engine.train_batch(interrupted([next(data(0, 1))] * (1 - rank)))
    with pytest.raises(UnfinishedBatchError, match=f"a batch ended in its middle on stage {rank}"):
        engine.eval_batch(data(0, 1))


def test_a_rank_that_left_a_batch_in_its_middle_sends_no_more() -> None:
    run_ranks(ended_in_the_middle, 2, Run(2, 1))
