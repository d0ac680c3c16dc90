"""Partitions whose stages take about as long: where a search for the shortest batch begins."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from dynpipe_ds.partition.neighbours import Cuts
from dynpipe_ds.simulation.workload import FloatArray


def most_groups(until_s: FloatArray, num_stages: int) -> int:
    """How many groups of layers a stage may hold at most, if it takes no more than twice its share.

    Args:
        until_s: K + 1 seconds of the first 0, 1, ... K groups.
        num_stages: S.

    Returns:
        W, at least 1: a group above the share is a stage by itself.
    """
    share_s = max(float(until_s[-1]) / num_stages, float(np.diff(until_s).max()))
    last = np.searchsorted(until_s, until_s + 2 * share_s, side="right") - 1
    return int((last - np.arange(len(until_s))).max())


def even_cuts(seconds: FloatArray, num_doublings: int) -> Cuts | None:
    """The partition with the least sum of powers of what its stages take, exactly.

    A smallest longest stage leaves all others open, and an order waits less the shorter they are. Dynamic programming
    over stages. Products alone, which are the same on every processor.

    Args:
        seconds: ``(S, K + 1, W + 1)``, of each stage if it holds the 0, 1, ... W groups before the 0th, 1st, ... Kth;
            infinite where it may not.
        num_doublings: of the power, from 1 on. With many, the longest stage alone counts.

    Returns:
        S + 1 indices of groups; ``None`` where there is no such partition.
    """
    allowed = np.isfinite(seconds)
    if not allowed.any():
        return None
    costs = np.ascontiguousarray(seconds.transpose(0, 2, 1)) / max(float(seconds[allowed].mean()), np.finfo(float).tiny)
    for _ in range(num_doublings):
        costs *= costs
    num_ends, num_widths = seconds.shape[1:]
    sums = np.full(num_widths - 1 + num_ends, np.inf)  # up to each group, with the stages so far; none before the first
    sums[num_widths - 1] = 0.0
    before = sliding_window_view(sums, num_widths).T[::-1]  # of each width and end, where the stage begins
    without = []  # of each stage, the sums without it
    for cost in costs:
        without.append(sums.copy())
        sums[num_widths - 1 :] = (before + cost).min(axis=0)
    if not np.isfinite(sums[-1]):
        return None
    cuts = [num_ends - 1]
    for sums, cost in zip(reversed(without), costs[::-1], strict=True):
        end = cuts[-1]
        cuts.append(end - int((sums[end : end + num_widths][::-1] + cost[:, end]).argmin()))
    return tuple(reversed(cuts))
