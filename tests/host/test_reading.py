"""Where a replica is gone, the others read its micro-batches beside their own, from where training is."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dynpipe_ds.host.reading import Reading


class Grid:
    """Two replicas at the start, of which this one is the second."""

    replica, count = 1, 2

    def get_data_parallel_id(self) -> int:
        return self.replica

    def get_data_parallel_world_size(self) -> int:
        return self.count


@pytest.fixture
def engine() -> Any:
    return SimpleNamespace(
        grid=Grid(), micro_batch_size=4, micro_batches=2, data_iterator=None, stage_id=0,
        is_first_stage=lambda: True, is_last_stage=lambda: False,
    )


def lose_the_first(engine: Any) -> None:
    engine.grid.replica, engine.grid.count, engine.micro_batches = 0, 1, 4


def open_at(batch: int, replica: int) -> Iterator[str]:
    return iter([f"{replica}.{number}" for number in range(2 * batch, 20)])


def read(reading: Reading, batch: int, number: int) -> list[Any]:
    with reading.kept.batch(batch):
        return [reading.next(lambda: "of the iterator") for _ in range(number)]


def test_a_rank_reads_the_iterator_that_it_was_given(engine: Any) -> None:
    reading = Reading(engine)
    reading.start()
    assert not reading.lacks_replicas and read(reading, 0, 2) == ["of the iterator"] * 2


def test_who_begins_to_read_for_a_lost_replica_begins_at_the_present_batch(engine: Any) -> None:
    reading = Reading(engine)
    reading.start()
    reading.open_at = open_at
    lose_the_first(engine)
    assert reading.lacks_replicas and (reading.num_loaded, reading.num_of_source) == (4, 2)
    assert read(reading, 3, 4) == ["0.6", "0.7", "1.6", "1.7"]
    assert read(reading, 4, 4) == ["0.8", "0.9", "1.8", "1.9"]
    assert read(reading, 3, 4) == ["0.6", "0.7", "1.6", "1.7"], "kept until a snapshot covers it"


def test_each_micro_batch_is_seeded_as_on_the_replica_that_it_is_of(engine: Any) -> None:
    reading = Reading(engine)
    reading.start()
    assert reading.offsets(10) == {}
    lose_the_first(engine)
    assert reading.offsets(10) == {10: 10, 11: 11, 12: 10, 13: 11}


def test_evaluation_reads_what_it_is_given(engine: Any) -> None:
    reading = Reading(engine)
    reading.start()
    reading.open_at = open_at
    lose_the_first(engine)
    assert reading.next(lambda: "to evaluate") == "to evaluate"


def test_without_data_at_the_lost_data_is_refused(engine: Any) -> None:
    reading = Reading(engine)
    reading.start()
    lose_the_first(engine)
    with pytest.raises(ValueError, match="micro-batches of lost replicas; say by engine.data_at how"):
        read(reading, 3, 1)


def test_a_number_that_cant_be_dealt_is_refused_by_name(engine: Any) -> None:
    reading = Reading(engine)
    reading.start()
    lose_the_first(engine)
    engine.micro_batches = 3
    with pytest.raises(ValueError, match="a batch of 3 micro-batches can't be dealt"):
        _ = reading.num_of_source
