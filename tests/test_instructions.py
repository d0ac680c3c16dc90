"""How a stage tells the next one what it is about to send."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe import schedule

from dynpipe_ds.instructions import _META_SIZE, _decode_meta, _encode_meta, instruction_map, send_gradients


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


class Sampling(schedule.PipeInstruction):
    """An instruction of a client's own."""


def own(engine: Any, **kwargs: Any) -> Any:
    engine.seen.append(kwargs)


def test_a_clients_own_instructions() -> None:
    class Mine(deepspeed.PipelineEngine):  # type: ignore[misc]
        _INSTRUCTION_MAP = {
            **deepspeed.PipelineEngine._INSTRUCTION_MAP, schedule.ForwardPass: own, Sampling: own,
        }

    plain, mine = instruction_map(deepspeed.PipelineEngine), instruction_map(Mine)
    assert plain[schedule.SendGrad].__wrapped__ is send_gradients
    assert plain[schedule.ForwardPass].__wrapped__ is deepspeed.PipelineEngine._exec_forward_pass
    assert mine[schedule.ForwardPass].__wrapped__ is own and mine[Sampling] is own
    assert mine.keys() - plain.keys() == {Sampling}
    engine = SimpleNamespace(seen=[], module=SimpleNamespace(recorder=None))
    mine[schedule.ForwardPass](engine, buffer_id=3)
    assert engine.seen == [{"buffer_id": 3}]


def test_an_own_instruction_where_ours_is_needed() -> None:
    class Mine(deepspeed.PipelineEngine):  # type: ignore[misc]
        _INSTRUCTION_MAP = {**deepspeed.PipelineEngine._INSTRUCTION_MAP, schedule.SendGrad: own}

    with pytest.raises(ValueError, match=r"Mine\._INSTRUCTION_MAP has own for SendGrad, .*only ForwardPass, Reduce"):
        instruction_map(Mine)
