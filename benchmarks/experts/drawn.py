"""What routers are told in the measured benchmarks, and what planners are told of the machine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.experts.settings import Setting
from benchmarks.experts.waiting import BACKWARD, Batch, Sizes, Waiting
from scenarios.moe.measuring import measured_constants
from scenarios.moe.placing import Constants, Lanes, Sample, fitted

CALIBRATING = 6
"""Random placements that constants are fitted to, besides static and all local."""


def routed(setting: Setting, sizes: Sizes, batches: int) -> list[list[list[Tensor]]]:
    """Rows of each rank for each expert, ``[R, E]``, by batch, block and micro-batch; the same on all ranks.

    Args:
        setting: as of the simulated tables; its tokens are those of a batch.
        sizes: how many blocks and micro-batches.
        batches: how many.
    """
    by_block = []
    for block in range(sizes.blocks):
        draw = np.random.default_rng(block)
        by_block.append([_cut(draw, loads, sizes.micro_batches) for loads in setting.loads(block, batches)])
    return [[block[batch] for block in by_block] for batch in range(batches)]


def _cut(draw: np.random.Generator, loads: np.ndarray, parts: int) -> list[Tensor]:
    """Cut a batch's rows into micro-batches, all as large, each row in any of them."""
    found = np.zeros((parts, *loads.shape), dtype=np.int64)
    for source, counts in enumerate(loads):
        experts = draw.permutation(np.repeat(np.arange(len(counts)), counts))
        for part, chosen in enumerate(np.array_split(experts, parts)):
            found[part, source] = np.bincount(chosen, minlength=len(counts))
    return [torch.from_numpy(each) for each in found]


def sample_of(batch: Batch, block: int) -> Sample:
    """What a block took, for fitting.

    Args:
        batch: where nothing else ran beside the block's transfers.
        block: its index.
    """
    forward, backward, exchange, *_ = (tuple(each) for each in batch.shared.times[block].tolist())
    loads = tuple(map(tuple, batch.shared.rows[block].tolist()))
    return Sample(
        lanes=batch.shared.lanes[block], loads=loads, forward_s=forward, backward_s=backward,
        all_to_all_s=max(exchange) or None, trans_s=batch.trans_s[block] or None, agg_s=batch.agg_s[block] or None,
    )  # fmt: skip


def calibrated(sizes: Sizes, setting: Setting, repeats: int) -> Constants:
    """Measure what the performance model has to know; collective.

    Seconds of exchanges, Trans and Agg begin with what a training measures at its start, and are then fitted to
    batches of one block, in which one part comes after the other. Seconds of rows are told.

    Args:
        sizes: of the blocks.
        setting: of what is routed, drawn anew.
        repeats: of each placement.

    Returns:
        The same on every rank.
    """
    alone = replace(sizes, blocks=1, micro_batches=1, rest_s=0.0)  # waits as long: caches are as cold then
    stage = Waiting(alone)
    known = measured_constants(
        stage.group, sizes.shapes, dtype=torch.float32, sum_dtype=torch.float32, device=torch.device("cpu"),
        num_micro_batches=1,
    )  # fmt: skip
    placements = [Lanes.static(stage.num_ranks, sizes.num_experts), Lanes.local(stage.num_ranks, sizes.num_experts)]
    draw = np.random.default_rng(1)
    for share in np.geomspace(0.02, 0.8, CALIBRATING):
        owner = np.array(placements[0].owner)
        moved = draw.random(owner.shape) < share
        owner[moved] = np.broadcast_to(np.arange(stage.num_ranks)[:, None], owner.shape)[moved]
        placements.append(Lanes(tuple(map(tuple, owner.tolist()))))
    samples = []
    for repeat, tables in enumerate(routed(setting, alone, repeats + 1)):
        for lanes in placements:
            batch = stage.batch(tables, {0: lanes})
            if repeat:  # the first one is slower
                samples.append(replace(sample_of(batch, 0), layer_s=batch.trained_s))
    stage.close()
    found = fitted(known, samples)
    return replace(
        found, forward_row_s=sizes.row_s, backward_row_s=BACKWARD * sizes.row_s, lane_s=0.0,
        rest_forward_s=sizes.rest_s * sizes.micro_batches,
        rest_backward_s=BACKWARD * sizes.rest_s * sizes.micro_batches, num_micro_batches=sizes.micro_batches,
    )  # fmt: skip
