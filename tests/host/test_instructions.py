"""What a dynamic engine does for each instruction, and what a client's own may stand in for."""

from __future__ import annotations

from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe import schedule

from dynpipe_ds.host.halves import InFlight
from dynpipe_ds.host.instructions import check_schedule, forward_pass, instruction_map, keep_loss
from dynpipe_ds.host.passing import send_gradients


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
    assert unwrap(plain[schedule.ForwardPass]) is forward_pass
    assert unwrap(mine[schedule.ForwardPass]) is own and mine[Sampling] is own
    assert mine.keys() - plain.keys() == {Sampling}
    module = torch.nn.Module()
    module.recorder = None
    buffers = {"inputs": [None] * 4}
    engine = SimpleNamespace(
        seen=[], module=module, pipe_buffers=buffers, is_first_stage=lambda: False, is_last_stage=lambda: False,
        dynamic=SimpleNamespace(pipeline=SimpleNamespace(channels=SimpleNamespace(is_dropped=False))),
    )
    mine[schedule.ForwardPass](engine, buffer_id=3)
    assert engine.seen == [{"buffer_id": 3}]


def test_the_loss_is_kept_for_each_micro_batch() -> None:
    losses = iter("ab")

    def forward(engine: Any, buffer_id: int) -> None:
        engine.loss = next(losses)

    in_flight = InFlight()
    dynamic = SimpleNamespace(pipeline=SimpleNamespace(in_flight=in_flight))
    engine = SimpleNamespace(dynamic=dynamic, is_last_stage=lambda: True)
    for buffer_id in (1, 0):
        keep_loss(forward)(engine, buffer_id=buffer_id)
    assert in_flight.losses == {1: "a", 0: "b"}
    with torch.no_grad():  # in evaluation nobody takes it
        losses = iter("c")
        keep_loss(forward)(engine, buffer_id=2)
    assert in_flight.losses == {1: "a", 0: "b"}


def test_a_planned_schedule_beside_instructions_of_ones_own() -> None:
    class Mine(deepspeed.PipelineEngine):  # type: ignore[misc]
        _INSTRUCTION_MAP = {**deepspeed.PipelineEngine._INSTRUCTION_MAP, Sampling: own}

    check_schedule("planned", deepspeed.PipelineEngine)
    check_schedule("auto", Mine)
    with pytest.raises(ValueError, match="Mine has instructions of its own, Sampling, .* set schedule to 'auto'"):
        check_schedule("planned", Mine)


def test_an_own_instruction_where_ours_is_needed() -> None:
    class Mine(deepspeed.PipelineEngine):  # type: ignore[misc]
        _INSTRUCTION_MAP = {**deepspeed.PipelineEngine._INSTRUCTION_MAP, schedule.SendGrad: own}

    with pytest.raises(ValueError, match=r"Mine\._INSTRUCTION_MAP has own for SendGrad, .*only ForwardPass, Reduce"):
        instruction_map(Mine)
