"""The loader's samples in smaller and larger micro-batches: all of them, in their order, to the last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dynpipe_ds.host.slicing import Slicing


def loader(size: int, num_micro_batches: int) -> Iterator[Any]:
    """Micro-batches whose samples tell their number: (two inputs, a label)."""
    for number in range(num_micro_batches):
        samples = torch.arange(number * size, (number + 1) * size)
        yield (samples[:, None] * torch.ones(1, 3), [samples.clone()]), samples.clone()


def samples_of(micro_batch: Any) -> list[int]:
    (first, (second,)), label = micro_batch
    numbers: list[int] = label.tolist()
    assert first[:, 2].tolist() == second.tolist() == numbers
    return numbers


@pytest.mark.parametrize(("given", "sizes"), [(4, (4, 2, 1, 8, 4)), (3, (2, 4, 6, 1)), (6, (4, 3, 12)), (1, (8, 1))])
def test_every_batch_has_its_samples(given: int, sizes: tuple[int, ...]) -> None:
    """Batches of 24 samples, each in micro-batches of another size."""
    batches = loader(given, 24 // given * len(sizes))
    slicing = Slicing(given)
    for batch, size in enumerate(sizes):
        slicing.begin(size)
        found = [samples_of(slicing.next(lambda: next(batches))) for _ in range(24 // size)]
        assert {len(samples) for samples in found} == {size}
        assert sum(found, []) == list(range(24 * batch, 24 * (batch + 1)))
        assert slicing.num_read(24 // size) == 24 // given
    assert next(batches, None) is None, "each batch has read as many as before"


def test_evaluation_reads_as_the_loader_gives() -> None:
    batches, slicing = loader(4, 2), Slicing(4)
    slicing.begin(None)
    assert samples_of(slicing.next(lambda: next(batches))) == [0, 1, 2, 3]
    assert slicing.num_read(2) == 2


def test_what_a_dropped_batch_left_is_given_to_nobody() -> None:
    batches, slicing = loader(4, 3), Slicing(4)
    slicing.begin(2)
    assert samples_of(slicing.next(lambda: next(batches))) == [0, 1]
    slicing.begin(2)
    assert samples_of(slicing.next(lambda: next(batches))) == [4, 5]


@pytest.mark.parametrize(
    ("micro_batch", "text"),
    [
        ((torch.zeros(3, 2), torch.zeros(4)), "has the shape \\(3, 2\\); its first dimension must be that of the 4"),
        ((torch.zeros(4, 2), torch.tensor(1.0)), "has the shape \\(\\)"),
        ((torch.zeros(4, 2), {"labels": torch.zeros(4)}), "has a dict in it; only tensors, in tuples and lists"),
        (None, "has a NoneType in it"),
    ],
)
def test_data_that_can_not_be_cut(micro_batch: Any, text: str) -> None:
    """It is known from batches before, and stops no batch whose micro-batches stay as they are."""
    slicing = Slicing(4)
    slicing.begin(4)
    assert slicing.next(lambda: micro_batch) is micro_batch
    with pytest.raises(ValueError, match=f"can't be cut from the data: .*{text}"):
        slicing.check()
    slicing.begin(2)
    with pytest.raises(ValueError, match=text):
        slicing.next(lambda: micro_batch)
    slicing.begin(4)
    slicing.next(lambda: (torch.zeros(4, 2), torch.zeros(4)))
    slicing.check()
