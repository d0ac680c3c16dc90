"""How a stage tells the next one what it is about to send."""

from __future__ import annotations

import pytest
import torch

from dynpipe_ds.instructions import _META_SIZE, _decode_meta, _encode_meta


def test_one_tensor() -> None:
    numbers = _encode_meta(torch.zeros(2, 3, requires_grad=True))
    assert _decode_meta(numbers) == (False, [(torch.float32, True, [2, 3])])


def test_a_tuple_of_many_kinds() -> None:
    tensors = (
        torch.zeros(2, 3, 4, dtype=torch.bfloat16, requires_grad=True), torch.zeros((), dtype=torch.int64),
        torch.zeros(5, dtype=torch.bool), torch.zeros(0, 7, dtype=torch.float64),
    )  # fmt: skip
    assert _decode_meta(_encode_meta(tensors)) == (True, [
        (torch.bfloat16, True, [2, 3, 4]), (torch.int64, False, []), (torch.bool, False, [5]),
        (torch.float64, False, [0, 7]),
    ])  # fmt: skip
    assert _decode_meta(_encode_meta(tensors[:1])) == (True, [(torch.bfloat16, True, [2, 3, 4])])


def test_what_follows_in_the_message_is_ignored() -> None:
    numbers = _encode_meta(torch.zeros(3))
    padded = numbers + [0] * (_META_SIZE - len(numbers))
    assert _decode_meta(padded) == _decode_meta(numbers)


def test_too_many_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the 60 tensors between two stages need 302 numbers .* more than 256"):
        _encode_meta(tuple(torch.zeros(1, 1) for _ in range(60)))
