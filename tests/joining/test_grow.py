"""Workers join a run that trains: the same bits as on any partition."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.configs import BF16, ZERO
from tests.distributed.models import Run
from tests.joining.runs import assert_same_bits

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "ZeRO-1": ZERO,
    "bf16 + ZeRO-1": {**BF16, **ZERO},
}
COMMON = {"gradient_clipping": 0.5, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_more_and_two_more(name: str) -> None:
    run = Run(1, num_batches=7, dropout=0.1, tied=name != "AdamW", config={**COMMON, **OPTIMIZERS[name]})
    last = assert_same_bits(run, 1, {1: 2, 3: 4}, newcomers=3)
    assert len(last) == 4
    assert [event.joined_ranks for event in last[0].events] == [(1,), (1, 2)]
