"""The norm for clipping: the same bits in float64, before any rounding, wherever ZeRO-1 splits the gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, CLIP, ZERO
from tests.distributed.models import Run, make_engine, train
from tests.distributed.ranks import run_ranks
from tests.distributed.ways import CUTS
from tests.matrix import mostly

NUM_LAYERS = 8


def sums_at_cuts(_rank: int, run: Run) -> list[list[list[float]]]:
    return [sums_by_layer(replace(run, first=cut)) for cut in CUTS]


def sums_by_layer(run: Run) -> list[list[float]]:
    """Sums of squares by layer, one list for each batch."""
    found, original = [], dist.all_reduce

    def spy(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        if tensor.dtype is torch.float64 and tensor.numel() == NUM_LAYERS and not args and not kwargs:
            found.append(tensor.tolist())
        return result

    engine = make_engine(run)
    with patch.object(dist, "all_reduce", spy):
        train(engine, run)
    return found


@pytest.mark.parametrize(("bf16", "replicas"), mostly([(False, 2), (False, 3), (True, 2)], [(False, 2)]))
def test_sums_do_not_depend_on_where_shares_end(bf16: bool, replicas: int) -> None:
    config = {**ADAMW, **(BF16_FP32_SUMS if bf16 else ZERO), **CLIP}
    seen = run_ranks(sums_at_cuts, 2 * replicas, Run(2, num_batches=3, config=config))[0]
    assert len(seen[0]) == 3 and all(square > 0 for sums in seen[0] for square in sums)
    assert seen[0] == seen[1] == seen[2]
