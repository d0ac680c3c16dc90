"""What a run records for its report: seconds of every layer over training, partitions, re-partitions.

A recording is plain values, for JSON and checkpoints alike, and its size is bounded: when it has
:data:`MOST_ROWS` rows, neighbours are averaged and every row stands for twice as many batches.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

from dynpipe_ds import PipelineProfile, RebalanceEvent

MOST_ROWS = 512
_DIGITS = 8  # of seconds


class Recording(TypedDict):
    """Values of one run.

    Attributes:
        names: name of every layer.
        num_micro_batches: M.
        batches_a_row: how many profiled batches a row is the mean of.
        first_batches: the first batch of every row.
        forward_s: forward seconds of a micro-batch, a row of L numbers each.
        backward_s: the same for the backward.
        open_rows: profiled batches of the row that is not full yet: batch, forward_s, backward_s.
        partitions: first batch of, and boundaries: every partition that a profiled batch ran on.
        rebalances: :class:`~dynpipe_ds.RebalanceEvent` as dictionaries.
    """

    names: list[str]
    num_micro_batches: int
    batches_a_row: int
    first_batches: list[int]
    forward_s: list[list[float]]
    backward_s: list[list[float]]
    open_rows: list[list[Any]]
    partitions: list[list[Any]]
    rebalances: list[dict[str, Any]]


def new_recording() -> Recording:
    """Return a recording of nothing."""
    return {
        "names": [], "num_micro_batches": 1, "batches_a_row": 1, "first_batches": [], "forward_s": [],
        "backward_s": [], "open_rows": [], "partitions": [], "rebalances": [],
    }  # fmt: skip


def record_profile(recording: Recording, batch: int, profile: PipelineProfile) -> None:
    """Take in the profile of one batch.

    Args:
        recording: is changed.
        batch: index of the batch.
        profile: as measured, not smoothed.
    """
    recording["names"] = [layer.name for layer in profile.layers]
    recording["num_micro_batches"] = profile.num_micro_batches
    boundaries = list(profile.boundaries)
    if not recording["partitions"] or recording["partitions"][-1][1] != boundaries:
        recording["partitions"].append([batch, boundaries])
    forward_s = [layer.forward_s for layer in profile.layers]
    recording["open_rows"].append([batch, forward_s, [layer.backward_s for layer in profile.layers]])
    if len(recording["open_rows"]) >= recording["batches_a_row"]:
        _close_row(recording)
    if len(recording["first_batches"]) >= MOST_ROWS:
        _halve(recording)


def record_rebalance(recording: Recording, event: RebalanceEvent) -> None:
    """Take in a change of partition.

    Args:
        recording: is changed.
        event: as the engine tells it.
    """
    values = dataclasses.asdict(event)
    recording["rebalances"].append({**values, "before": list(event.before), "after": list(event.after)})


def _close_row(recording: Recording) -> None:
    batches, forward_s, backward_s = zip(*recording["open_rows"], strict=True)
    recording["first_batches"].append(batches[0])
    recording["forward_s"].append(_mean(forward_s))
    recording["backward_s"].append(_mean(backward_s))
    recording["open_rows"] = []


def _halve(recording: Recording) -> None:
    recording["batches_a_row"] *= 2
    recording["first_batches"] = recording["first_batches"][::2]
    for rows in (recording["forward_s"], recording["backward_s"]):
        rows[:] = [_mean(rows[i : i + 2]) for i in range(0, len(rows), 2)]


def _mean(rows: Any) -> list[float]:
    return [round(sum(column) / len(rows), _DIGITS) for column in zip(*rows, strict=True)]
