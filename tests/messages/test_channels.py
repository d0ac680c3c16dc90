"""Channels on wires that keep NCCL's rule: whatever the order, all arrives, nothing waits for ever, all is bounded."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from dynpipe_ds.messages.channels import WINDOW, Channels, Incoming, Outgoing, Stamp, UnfinishedBatchError
from dynpipe_ds.messages.crossing import FIRST_BYTES, Crossing, Links, Told
from dynpipe_ds.messages.traffic import Kind, Message, traffic_of
from dynpipe_ds.schedule import Order, order_of
from tests.messages.fabric import CPU, Batch, Deadlock, Fabric, FabricWire, drawn, planned, run_stages

DELAY_S = 3e-4


def orders(num_stages: int, num_drawn: int) -> Iterator[Order]:
    for name in ("1f1b", "gpipe"):
        yield order_of(name, num_stages + 2, num_stages)  # type: ignore[arg-type]
    yield from (planned(count, num_stages) for count in (2, num_stages + 2, 3 * num_stages))
    draw = random.Random(num_stages)
    yield from (drawn(draw, num_stages, draw.randint(1, 6)) for _ in range(num_drawn))


def variants(order: Order) -> Iterator[Batch]:
    """Told once and each time; of one shape and of many; with frozen layers at the begin; at random moments."""
    def of_many(stage: int, micro_batch: int) -> tuple[int, ...]:
        return (micro_batch % 3, 1 + stage) if stage % 2 else (300, 2)  # some are empty, some long

    yield Batch(order, delay_s=DELAY_S)
    yield Batch(order, shape=of_many, is_dynamic=True, delay_s=DELAY_S)
    yield Batch(order, wants=lambda stage: stage >= order.num_stages // 2)


@pytest.mark.parametrize("num_stages", range(2, 9))
def test_all_orders_run(num_stages: int) -> None:
    for order in orders(num_stages, 6):
        runs = run_stages([*variants(order), Batch(order)], Fabric(num_stages))
        assert not any(run.refusals for run in runs)
        assert all(run.most_posted <= max(WINDOW, order.num_micro_batches) for run in runs)


def test_receives_are_posted_ahead_within_the_window() -> None:
    order = order_of("1f1b", 12, 4)
    assert {run.most_posted for run in run_stages([Batch(order)], Fabric(4))} == {WINDOW}


def test_an_order_that_waits_for_ever_is_caught() -> None:
    order = Order.parse("F0 SA0 RG0 B0 F1 SA1 RG1 B1 | RA0 F0 RA1 F1 B0 SG0 B1 SG1")
    with pytest.raises(Deadlock):
        run_stages([Batch(order)], Fabric(2))


@pytest.mark.parametrize("num_stages", [2, 3, 5, 8])
def test_all_hear_of_a_batch_that_is_dropped(num_stages: int) -> None:
    """Whoever drops it early; and the next one is not dropped."""
    for order in orders(num_stages, 0):
        for stage in (0, num_stages - 1) if order.num_micro_batches > num_stages else ():
            runs = run_stages([Batch(order, dropped_by=stage), Batch(order)], Fabric(num_stages))
            assert [run.knew for run in runs] == [[True, False]] * num_stages
            assert not any(run.refusals for run in runs)


def test_one_communicator_for_both_directions_would_block() -> None:
    """The rule that is enforced: a receive posted ahead holds up the sends behind it."""
    order = order_of("1f1b", 6, 3)
    with pytest.raises(Deadlock):
        run_stages([Batch(order)], Fabric(3, lambda a, b: frozenset((a, b))))


class Pair:
    """One channel from stage 0 to stage 1."""

    def __init__(self) -> None:
        fabric = Fabric(1)  # of one thread: what can't be received raises
        self.out, self.into = Outgoing(FabricWire(fabric, 0, 1), CPU), Incoming(FabricWire(fabric, 1, 0), CPU)
        self.links, self.refusals = Links(), list[str]()

    def begin(self, sent: Stamp, planned: Stamp, count: int) -> None:
        coming = [Message(Kind.ACTIVATION, m) for m in range(count)]
        self.out.begin(sent, count)
        self.into.begin(planned, coming, self.links, self.refusals.append)


def send(pair: Pair, messages: list[Message], values: list[object]) -> None:
    for message, value in zip(messages, values, strict=True):
        crossing, tensors = Crossing.of(value)
        is_told = pair.links.tells(pair.links.outputs)
        pair.links.outputs = crossing if is_told else pair.links.outputs
        pair.out.send(message, Told(crossing) if is_told else None, tensors)


ACTIVATION = [Message(Kind.ACTIVATION, m) for m in range(4)]


@pytest.mark.parametrize(("messages", "stamp", "what"), [
    ([ACTIVATION[0], ACTIVATION[2]], Stamp(3, 7), "the activation of micro-batch 2 came where the activation of "
     "micro-batch 1 was planned"),
    ([Message(Kind.GRADIENT, 0), ACTIVATION[1]], Stamp(3, 7), "the gradient of micro-batch 0 came where the activ"),
    (ACTIVATION[:2], Stamp(2, 7), r"was planned \(of schedule 2 instead of 3\)$"),
    (ACTIVATION[:2], Stamp(3, 8), r"was planned \(by another order\)$"),
])  # fmt: skip
def test_another_message_than_planned_is_named(messages: list[Message], stamp: Stamp, what: str) -> None:
    pair = Pair()
    pair.begin(stamp, Stamp(3, 7), 2)
    send(pair, messages, [torch.ones(2), torch.ones(2)])
    for message in ACTIVATION[:2]:
        pair.into.take(message)
    assert re.search(what, pair.refusals[0])


def test_values_of_all_kinds() -> None:
    """No elements, gaps, offsets, long descriptions, plain values: told each time or once, all arrive as they lay."""
    gaps = torch.arange(40.0).view(5, 8)[:, 1:6]
    several: tuple[object, ...] = (torch.zeros(0, 3), gaps, torch.arange(9)[4:])
    for value in (several, torch.zeros(0), {f"k{i}": torch.ones(1) for i in range(200)}, [gaps, 3]):
        values: list[object] = [value] * 3
        pair = Pair()
        pair.begin(Stamp(), Stamp(), 3)
        send(pair, ACTIVATION[:3], values)
        for message, sent in zip(ACTIVATION, values, strict=False):
            crossing, _, tensors = pair.into.take(message)
            assert crossing == Crossing.of(sent)[0] and not pair.refusals
            for here, there in zip(tensors, Crossing.of(sent)[1], strict=True):
                assert torch.equal(here, there) and here.stride() == there.stride()
        assert pair.into.is_idle
    assert len(Crossing.of({f"k{i}": torch.ones(1) for i in range(200)})[0].encode()) > FIRST_BYTES


def test_rows_stay_until_they_are_through() -> None:
    pair = Pair()
    pair.begin(Stamp(), Stamp(), 4)
    send(pair, ACTIVATION, [torch.full((4,), float(m)) for m in range(4)])
    assert pair.out.num_under_way == 4
    taken = [float(pair.into.take(message).tensors[0][0]) for message in reversed(ACTIVATION)]
    assert taken == [3.0, 2.0, 1.0, 0.0], "asked for in another sequence than sent"
    pair.out.finish()
    assert pair.out.num_under_way == 0
    with pytest.raises(RuntimeError, match="the activation of micro-batch 3 is not among what the neighbouring stage"):
        pair.into.take(ACTIVATION[3])


def test_a_batch_after_one_that_ended_in_its_middle() -> None:
    """Its messages are still expected elsewhere, so nothing more is sent from here."""
    traffic, fabric = traffic_of(order_of("1f1b", 2, 2), 1), Fabric(1)
    channels = Channels({0: FabricWire(fabric, 1, 0)}, CPU, 1)
    channels.check_over()
    channels.begin(traffic, Links(), print)
    with pytest.raises(UnfinishedBatchError, match="a batch ended in its middle on stage 1, because something raised"):
        channels.check_over()


def test_labels_differ() -> None:
    labels = [Stamp(b, d).label(Message(k, m)) for b in (0, 1) for d in (0, 1) for k in Kind for m in (0, 1)]
    assert len(set(labels)) == len(labels) and all(len(a) == len(b) == 16 for a, b in pairwise(labels))
