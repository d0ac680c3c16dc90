"""Orders that split the backward train the bits of 1F1B."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.configs import ADAMW, BF16, BF16_FP32_SUMS, CLIP, FP16, MOVES, ZERO
from tests.distributed.models import Run
from tests.distributed.splitting import AT_THE_END, compare_with_1f1b

IMMEDIATE = {"bf16": {"enabled": True, "immediate_grad_update": True}}
SHORT_MOVES = {2: {1: (0, 2, 8)}, 3: {1: (0, 1, 6, 8)}, 4: {1: (0, 1, 2, 6, 8)}}

TYPICAL: dict[str, tuple[Run, list[int], int]] = {
    "fp32, clipped": (Run(2, 3, config={**ADAMW, **CLIP}, moves=SHORT_MOVES[2]), [0, 3], 1),
    "tied, dropout": (Run(3, 3, tied=True, dropout=0.2, config=ADAMW, moves=SHORT_MOVES[3]), [1], 1),
    "bf16": (Run(2, 3, config={**ADAMW, **BF16}), [3], 1),
    "fp16 + zero1": (Run(2, 4, config={**ADAMW, **ZERO, **FP16}), [AT_THE_END], 1),
}

MORE: dict[str, tuple[Run, list[int], int]] = {
    "tied": (Run(4, 6, tied=True, config=ADAMW, moves=MOVES[4]), [0, 1, 3, AT_THE_END], 1),
    "functions": (Run(3, 6, functions=True, config=ADAMW, moves={2: (0, 1, 2, 10), 5: (0, 6, 8, 10)}), [0, 1, 3], 1),
    "zero1": (Run(4, 6, config={**ADAMW, **ZERO, **CLIP}, moves=MOVES[4]), [0, 3], 1),
    "bf16": (Run(3, 6, config={**ADAMW, **BF16, **CLIP}, moves=MOVES[3]), [0, 1, AT_THE_END], 1),
    "bf16 immediate": (Run(3, 6, config={**ADAMW, **IMMEDIATE}, moves=MOVES[3]), [0, 3], 1),
    "bf16 + zero1": (Run(3, 6, config={**ADAMW, **BF16, **ZERO}, moves=MOVES[3]), [0, 3], 1),
    "bf16 + zero1, fp32 sums": (Run(3, 6, config={**ADAMW, **BF16_FP32_SUMS, **CLIP}, moves=MOVES[3]), [0, 3], 1),
    "fp16 + zero1": (Run(4, 7, config={**ADAMW, **ZERO, **FP16}, moves=MOVES[4]), [0, 1, 3], 1),
    "zero1, two replicas": (Run(2, 5, config={**ADAMW, **ZERO}, moves=MOVES[2]), [0, 3], 2),
    "fp32, three replicas": (Run(2, 5, dropout=0.1, config={**ADAMW, **CLIP}, moves=MOVES[2]), [1, AT_THE_END], 3),
    "bf16 + zero1, two replicas": (Run(2, 5, config={**ADAMW, **BF16_FP32_SUMS}, moves=MOVES[2]), [3], 2),
}


@pytest.mark.parametrize("case", TYPICAL)
def test_the_bits_are_those_of_1f1b(case: str) -> None:
    run, delays, replicas = TYPICAL[case]
    compare_with_1f1b(run, delays, replicas)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", MORE)
def test_the_bits_are_those_of_1f1b_in_more_configurations(case: str) -> None:
    run, delays, replicas = MORE[case]
    compare_with_1f1b(run, delays, replicas)


@pytest.mark.exhaustive
@pytest.mark.parametrize("interval", [1, 2])
def test_recomputed_layers_run_whole(interval: int) -> None:
    compare_with_1f1b(Run(3, 5, checkpoint_interval=interval, config=ADAMW, moves=MOVES[3]), [0, 3], splits=False)
