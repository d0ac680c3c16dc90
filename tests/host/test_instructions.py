"""What a dynamic engine does for each instruction, and what a client's own may stand in for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.pipe import schedule

from dynpipe_ds.host.instructions import forward_pass, instruction_map
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
    assert plain[schedule.ForwardPass].__wrapped__.__wrapped__ is forward_pass
    assert mine[schedule.ForwardPass].__wrapped__.__wrapped__.__wrapped__ is own and mine[Sampling] is own
    assert mine.keys() - plain.keys() == {Sampling}
    module = torch.nn.Module()
    module.recorder = None
    buffers = {"inputs": [None] * 4}
    engine = SimpleNamespace(seen=[], module=module, pipe_buffers=buffers, is_first_stage=lambda: False)
    mine[schedule.ForwardPass](engine, buffer_id=3)
    assert engine.seen == [{"buffer_id": 3}]


def test_an_own_instruction_where_ours_is_needed() -> None:
    class Mine(deepspeed.PipelineEngine):  # type: ignore[misc]
        _INSTRUCTION_MAP = {**deepspeed.PipelineEngine._INSTRUCTION_MAP, schedule.SendGrad: own}

    with pytest.raises(ValueError, match=r"Mine\._INSTRUCTION_MAP has own for SendGrad, .*only ForwardPass, Reduce"):
        instruction_map(Mine)
