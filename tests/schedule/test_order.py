"""Orders as values: their text, their checks, and the ones that have names."""

from __future__ import annotations

import pickle

import pytest

from dynpipe_ds.schedule import Instruction, Op, Order, order_of


def test_1f1b_by_hand() -> None:
    order = order_of("1f1b", 2, 2)
    assert str(order) == "F0 SA0 F1 RG0 SA1 B0 RG1 B1 | RA0 F0 B0 SG0 RA1 F1 B1 SG1"
    assert order.stages[1][0] == Instruction(Op.RECV_ACTIVATION, 0)
    assert str(order_of("1f1b", 3, 1)) == "F0 B0 F1 B1 F2 B2"


def test_gpipe_by_hand() -> None:
    assert str(order_of("gpipe", 2, 2)) == "F0 SA0 F1 SA1 RG0 B0 RG1 B1 | RA0 F0 RA1 F1 B0 SG0 B1 SG1"


@pytest.mark.parametrize("num_stages", [1, 2, 5])
@pytest.mark.parametrize("num_micro_batches", [1, 3, 8])
def test_a_value(num_stages: int, num_micro_batches: int) -> None:
    order = order_of("1f1b", num_micro_batches, num_stages)
    assert (order.num_stages, order.num_micro_batches) == (num_stages, num_micro_batches)
    assert Order.parse(str(order)) == order and hash(Order.parse(str(order))) == hash(order)
    assert pickle.loads(pickle.dumps(order)) == order
    held = [order.in_flight(stage) for stage in range(num_stages)]
    assert held == [min(num_micro_batches, num_stages - stage) for stage in range(num_stages)]
    assert order_of("gpipe", num_micro_batches, num_stages).in_flight(0) == num_micro_batches


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("F0 B0 F0", "stage 0 of 1 runs F1 0 times; it must run F, B of each of 2 micro-batches once"),
        ("F0 B0 B0", "stage 0 of 1 runs B0 2 times"),
        ("F0 B0 | RA0 F0 B0 SG0", "stage 0 of 2 runs SA0 0 times; it must run F, B, SA, RG"),
        ("F0 SA0 RG0 B0 | RA0 F0 B0", "stage 1 of 2 runs SG0 0 times"),
        ("F0 SA0 RG0 B0 | F0 RA0 B0 SG0", "stage 1 of 2 runs F0 before RA0, which it needs"),
        ("B0 F0", "stage 0 of 1 runs B0 before F0, which it needs"),
        ("F0 X0", "'X0' is not an instruction; one reads F, B, SA"),
        ("", "an order of 0 micro-batches on 1 stages: both must be >= 1"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Order.parse(text)


def test_unknown_schedule() -> None:
    with pytest.raises(ValueError, match="schedule = 'zb': must be '1f1b' or 'gpipe'"):
        order_of("zb", 2, 2)  # type: ignore[arg-type]
