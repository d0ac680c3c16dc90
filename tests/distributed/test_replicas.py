"""Three and more data-parallel replicas: the same bits whatever the cut, also after moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dynpipe_ds.host import reducing
from tests.distributed.configs import ADAMW, BF16, BF16_FP32_SUMS, CLIP, SGD, ZERO
from tests.distributed.models import Run
from tests.distributed.ranks import run_ranks
from tests.distributed.ways import assert_same_bits, at_cuts, train_ways
from tests.matrix import mostly

MODES: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "sgd": SGD,
    "zero1": {**ADAMW, **ZERO},
    "bf16": {**ADAMW, **BF16},
    "bf16_zero1": {**ADAMW, **BF16, **ZERO},
    "bf16_zero1_fp32_sums": {**ADAMW, **BF16_FP32_SUMS},
    "zero1_to_owners": {**ADAMW, "zero_optimization": {"stage": 1, "use_multi_rank_bucket_allreduce": False}},
    "zero1_in_one_piece": {**ADAMW, "zero_optimization": {"stage": 1, "reduce_scatter": False}},
    "zero1_small_buckets": {**ADAMW, "zero_optimization": {"stage": 1, "reduce_bucket_size": 700}},
    "zero1_while_computing": {**ADAMW, "zero_optimization": {"stage": 1, "overlap_comm": True}},
    "zero1_where_they_are": {**ADAMW, "zero_optimization": {"stage": 1, "contiguous_gradients": False}},
    "prescaled": {**ADAMW, "prescale_gradients": True},
    "divided_before": {**ADAMW, "gradient_predivide_factor": 2.0},
    "sent_as_bf16": {**ADAMW, "communication_data_type": "bf16"},
}


def sums(rank: int) -> None:
    """Compare with the sum that one process makes of what all hold."""
    num_ranks, group = dist.get_world_size(), dist.group.WORLD
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for size in (1, num_ranks - 1, num_ranks, 101):
            everyone = [
                torch.randn(size, generator=torch.Generator().manual_seed(r)).to(dtype)
                for r in range(num_ranks)
            ]
            expected = everyone[0].clone()
            for other in everyone[1:]:
                expected += other
            for piece_bytes in (64, 1 << 20):
                tensor = everyone[rank].clone()
                reducing.add_up(tensor, group, piece_bytes=piece_bytes)
                assert torch.equal(tensor, expected), (dtype, size, piece_bytes)


@pytest.mark.parametrize("num_ranks", mostly([2, 3, 5], [3]))
def test_each_element_is_added_in_the_order_of_the_ranks(num_ranks: int) -> None:
    run_ranks(sums, num_ranks)


@pytest.mark.parametrize(
    ("mode", "replicas"),
    mostly(
        [*((mode, 3) for mode in MODES), ("adamw", 4), ("zero1", 4), ("bf16", 4), ("zero1", 5)],
        [("zero1", 3)],
    ),
)
def test_every_cut_gives_the_same_bits(mode: str, replicas: int) -> None:
    run = Run(num_stages=2, num_batches=4, config={**MODES[mode], **CLIP})
    assert_same_bits(*train_ways(*at_cuts(run), replicas=replicas))
