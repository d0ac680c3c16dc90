"""Every micro-batch of a batch is trained by one replica, however many of them are left."""

from __future__ import annotations

import pytest

from dynpipe_ds.host.dealing import Hand, dealt, fewer
from dynpipe_ds.host.rereading import deal


@pytest.mark.parametrize(("sources", "each"), [(2, 4), (3, 2), (4, 3), (6, 5)])
def test_every_micro_batch_is_trained_once(sources: int, each: int) -> None:
    for replicas in (sources, *fewer(sources, each)):
        mine = sources * each // replicas
        hands = [hand for replica in range(replicas) for hand in dealt(replica, mine, each)]
        trained = [(hand.source, number) for hand in hands for number in range(hand.first, hand.stop)]
        assert trained == [(source, number) for source in range(sources) for number in range(each)]


def test_with_as_many_replicas_each_trains_its_own() -> None:
    assert dealt(1, 4, 4) == (Hand(1, 0, 4),)


def test_numbers_that_share_the_batch_out_evenly() -> None:
    assert list(fewer(4, 3)) == [3, 2, 1]
    assert list(fewer(3, 1)) == [1]
    assert list(fewer(3, 4, 2)) == [2, 1]


def test_dealing_goes_on_batch_by_batch() -> None:
    streams = {source: iter([f"{source}.{number}" for number in range(4)]) for source in (1, 2)}
    hands = (Hand(1, 1, 2), Hand(2, 0, 2))
    assert list(deal(streams, lambda: (hands, 2))) == ["1.1", "2.0", "2.1", "1.3", "2.2", "2.3"]
