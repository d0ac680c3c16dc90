"""What an order says about its messages."""

from __future__ import annotations

import random

import pytest

from dynpipe_ds.messages.traffic import Kind, Message, digest, most_under_way, traffic_in_line, traffic_of
from dynpipe_ds.schedule import Op, Order, order_of
from tests.messages.fabric import drawn

SWAPPED = Order.parse("F0 SA0 F1 SA1 RG1 B1 RG0 B0 | RA0 F0 RA1 F1 B1 SG1 B0 SG0")


def test_the_messages_of_a_stage() -> None:
    traffic = traffic_of(SWAPPED, 0)
    assert traffic.turns[Op.SEND_ACTIVATION] == (0, 1) and traffic.turns[Op.RECV_GRADIENT] == (1, 0)
    assert traffic.arrivals == {1: (Message(Kind.GRADIENT, 1), Message(Kind.GRADIENT, 0))}
    assert traffic.most == {1: 2}
    assert traffic_of(SWAPPED, 1).arrivals == {0: (Message(Kind.ACTIVATION, 0), Message(Kind.ACTIVATION, 1))}
    assert traffic_of(order_of("1f1b", 3, 1), 0).arrivals == {}
    line = traffic_in_line(3, 1, 3)
    assert line.arrivals == {0: tuple(Message(Kind.ACTIVATION, m) for m in range(3))}
    assert str(Message(Kind.GRADIENT, 7)) == "the gradient of micro-batch 7"


@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_no_more_is_under_way_than_an_order_holds(num_stages: int) -> None:
    """Under 1F1B what a stage has sent and not had back; GPipe sends all first."""
    one = order_of("1f1b", 32, num_stages)
    for stage in range(num_stages - 1):
        assert traffic_of(one, stage).most[stage + 1] == one.in_flight(stage) == num_stages - stage
        assert traffic_of(order_of("gpipe", 5, num_stages), stage).most[stage + 1] == 5
    assert most_under_way(one.stages[1], one.stages[0], -1) <= num_stages


def test_the_digest_tells_orders_apart() -> None:
    draw, seen = random.Random(0), {}
    for _ in range(50):
        order = drawn(draw, draw.randint(2, 4), draw.randint(1, 4))
        seen.setdefault(digest(order), set()).add(str(order))
    assert all(len(orders) == 1 for orders in seen.values()) and len(seen) > 20
    assert len({digest(Order.parse(f"{SWAPPED}{late}")) for late in ("", " @ 1 1", " @ 1 2")}) == 3
    assert digest(Order.parse(str(SWAPPED))) == digest(SWAPPED) != digest(order_of("gpipe", 2, 2))
