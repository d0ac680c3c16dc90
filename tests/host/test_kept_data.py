"""Micro-batches are read once and given twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from dynpipe_ds.host.kept_data import KeptData, all_streams, set_all_streams


def numbers() -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    for i in range(100):
        yield torch.full((2,), i), {"label": torch.full((3,), float(i))}


def plain(value: Any) -> Any:
    return [value[0].tolist(), value[1]["label"].tolist()]


def test_what_was_read_is_given_again_and_reading_goes_on() -> None:
    kept, data = KeptData(), numbers()
    first: dict[int, list[Any]] = {}
    for batch in (5, 6):
        with kept.batch(batch):
            first[batch] = [plain(kept.next(lambda: next(data))) for _ in range(3)]
    with kept.batch(7):
        partly = plain(kept.next(lambda: next(data)))
    for batch in (5, 6):
        with kept.batch(batch):
            assert [plain(kept.next(lambda: pytest.fail("read again"))) for _ in range(3)] == first[batch]
    with kept.batch(7):
        assert plain(kept.next(lambda: next(data))) == partly
        assert plain(kept.next(lambda: next(data)))[0] == [7, 7]
    assert kept.next(lambda: "outside of batches") == "outside of batches"
    assert kept.num_read(7) == 2


def test_who_changes_a_micro_batch_changes_no_kept_one() -> None:
    kept, data = KeptData(), numbers()
    for _ in range(3):
        with kept.batch(0):
            value = kept.next(lambda: next(data))
        assert plain(value) == [[0, 0], [0.0] * 3]
        value[0].fill_(9)
        value[1]["label"].fill_(9)


def test_streams_that_an_iterator_draws_from_are_put_where_it_left_them() -> None:
    kept = KeptData()

    def drawing() -> Tensor:
        numpy.random.rand()
        return torch.rand(2)

    results = []
    for _ in range(2):
        torch.rand(1)  # the script draws between batches
        with kept.batch(3):
            results.append([kept.next(drawing).tolist(), torch.rand(1).item(), numpy.random.rand()])
    assert results[0] == results[1]


def test_all_streams_go_back() -> None:
    before = all_streams()
    drawn = [torch.rand(1).item(), numpy.random.rand()]
    set_all_streams(before)
    assert drawn == [torch.rand(1).item(), numpy.random.rand()]


def test_of_another_past_nothing_is_left() -> None:
    kept, data = KeptData(), numbers()
    with kept.batch(2):
        kept.next(lambda: next(data))
        kept.is_first_time()
    kept.counters[3] = {"micro_offset": 1, "micro_steps": 1}
    kept.start_afresh()
    assert (kept.counters, kept.oldest, kept.num_noted) == ({}, None, 0)


def test_an_evaluation_that_is_tried_again_is_counted_once() -> None:
    kept, data = KeptData(), numbers()
    with kept.evaluation():
        for _ in range(2):
            kept.again()
            assert [plain(kept.next(lambda: next(data)))[0] for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]
        assert (kept.is_evaluating, kept.num_evaluated) == (True, 3)
    assert (kept.is_evaluating, kept.num_evaluated) == (False, 0)


def test_what_is_covered_is_forgotten_and_what_another_rank_read_can_be_taken() -> None:
    kept, other, data = KeptData(), KeptData(), numbers()
    for batch in range(4):
        with kept.batch(batch):
            kept.next(lambda: next(data))
            assert kept.is_first_time()
    per_batch = kept.num_bytes(0)
    assert per_batch == 2 * 8 + 3 * 4
    other.take(kept.give(1, 3))
    with other.batch(2):
        assert plain(other.next(lambda: pytest.fail("read")))[0] == [2, 2]
    kept.forget_before(3)
    assert (kept.oldest, kept.num_bytes()) == (3, per_batch)
    with kept.batch(3):
        assert not kept.is_first_time()
