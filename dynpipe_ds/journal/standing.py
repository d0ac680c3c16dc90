"""How a run stands, as plain values: what ``dynpipe watch`` shows and ``--json`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from dynpipe_ds.journal.read import Journal, ProfileTold

NEWEST = 10
"""Batches whose median says how long one takes now."""

_LATE = 5  # times the seconds of a batch, after which a silent run is worth a word


def standing(journal: Journal) -> dict[str, Any]:
    """How a run stands.

    Args:
        journal: that tells of it.

    Returns:
        Plain values; ``None`` for what is not told yet. Seconds of stages are those of the newest profiled batch. Of a
        job that has told of no batch yet (``is_starting``), nothing is taken from the run before it.
    """
    if journal.began is not None:
        return _starting(journal)
    seconds = [each.seconds for each in journal.batches[-NEWEST:]]
    losses = [each.loss for each in journal.batches if each.loss is not None]
    batch_s = median(seconds) if seconds else None
    profile = journal.profiles[-1] if journal.profiles else None
    samples = journal.about.get("samples_a_batch")
    return {
        "journal": str(journal.file), "num_batches": journal.batches[-1].batch + 1 if journal.batches else 0,
        "loss": losses[-1] if losses else None, "batch_s": batch_s,
        "samples_per_s": samples / batch_s if samples and batch_s else None,
        "silent_s": journal.silent_s, "has_ended": journal.has_ended, "is_starting": False,
        "is_late": not journal.has_ended and batch_s is not None and journal.silent_s > 60 + _LATE * batch_s,
        "num_ranks": journal.about.get("num_ranks"), "num_layers": len(journal.about.get("layers", ())),
        **(_of_profile(profile) if profile is not None else {}),
        "moves": [
            {**asdict(move), "seconds": move.seconds, "compiling_s": journal.compiled_after(move)}
            for move in journal.moves
        ],
        "compiling_s": sum(each.seconds for each in journal.compiled),
        "repacks": [{**asdict(repack), "seconds": repack.seconds} for repack in journal.repacks],
        "resumed_at": journal.resumed_at,
    }  # fmt: skip


def _starting(journal: Journal) -> dict[str, Any]:
    unknown = dict.fromkeys(("loss", "batch_s", "samples_per_s", "num_ranks"))
    return {
        "journal": str(journal.file), "num_batches": 0, **unknown, "silent_s": journal.silent_s,
        "has_ended": journal.has_ended, "is_starting": True, "is_late": False, "num_layers": 0, "moves": [],
        "repacks": [], "resumed_at": [],
        "num_batches_before": journal.batches[-1].batch + 1 if journal.batches else 0,
    }  # fmt: skip


def _of_profile(profile: ProfileTold) -> dict[str, Any]:
    limits = profile.limiting_stage
    stages = [
        {
            "stage": number, "first_layer": a, "num_layers": b - a, "busy_s": stage.busy_s,
            "waiting_s": stage.waiting_s, "fill_drain_s": stage.fill_drain_s, "step_s": stage.step_s,
            "bubble_ratio": stage.bubble_ratio, "peak_memory_bytes": stage.peak_memory_bytes or None,
            "limits": number == limits,
        }
        for number, (stage, (a, b)) in enumerate(zip(profile.stages, pairwise(profile.boundaries), strict=True))
    ]  # fmt: skip
    return {
        "profiled_batch": profile.batch, "boundaries": list(profile.boundaries), "order": profile.order,
        "bubble_ratio": profile.bubble_ratio, "limiting_stage": limits, "stages": stages,
    }


def in_columns(values: Sequence[float], columns: int) -> list[float]:
    """Means of neighbours, so that a series fits into so many columns.

    Args:
        values: the series, oldest first.
        columns: at least 1.
    """
    if len(values) <= columns:
        return list(values)
    return [fmean(values[a:b]) for a, b in pairwise(_edges(len(values), columns))]


def stages_over_time(journal: Journal, rows: int, columns: int) -> list[list[int]]:
    """Which stage held a layer when: a picture of so many rows and columns at most.

    Args:
        journal: of the run.
        rows: for layers, the first on top.
        columns: for profiled batches, the first on the left.

    Returns:
        A stage for every row and column; nothing where no batch was profiled.
    """
    profiles = journal.profiles
    shown = [profiles[round(i)] for i in _spread(len(profiles), columns)]
    if not shown:
        return []
    num_layers = shown[-1].boundaries[-1]
    layers = [round(i) for i in _spread(num_layers, rows)]
    return [[_stage_of(layer, profile.boundaries) for profile in shown] for layer in layers]


def _stage_of(layer: int, boundaries: Sequence[int]) -> int:
    return next(stage for stage, (a, b) in enumerate(pairwise(boundaries)) if a <= layer < b)


def _spread(count: int, wanted: int) -> Iterator[float]:
    """Indices over all of a list, the last one included."""
    number = min(count, wanted)
    yield from (i * (count - 1) / max(1, number - 1) for i in range(number))


def _edges(count: int, columns: int) -> list[int]:
    return [i * count // columns for i in range(columns + 1)]
