"""Constants of the performance model from measured batches: at start, and renewed while training. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scenarios.moe.placing.constants import Constants
from scenarios.moe.placing.lanes import Lanes
from scenarios.moe.placing.model import LayerModel
from scenarios.moe.placing.traffic import (
    Flags,
    Floats,
    Ints,
    Transfers,
    as_loads,
    count_agg,
    count_rows,
    count_trans,
    held,
)

ROUNDS = 30
"""Of re-weighting; residuals no longer change long before."""
TELLS_APART = 1e4
"""Largest condition number of samples that tell two constants apart."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one layer took in one batch; ``None`` for what was not measured.

    Args:
        lanes: the placement.
        loads: rows of each source for each expert in the whole batch, ``R`` rows of ``E``.
        forward_s: seconds that each rank computed in the experts' forward, ``[R]``, without waiting for others.
        backward_s: the same in the backward.
        all_to_all_s: of all four exchanges of rows, from the time that all ranks had come to them.
        trans_s: of Trans, nothing running beside it.
        agg_s: of Agg, nothing running beside it.
    """

    lanes: Lanes
    loads: tuple[tuple[float, ...], ...]
    forward_s: tuple[float, ...] | None = None
    backward_s: tuple[float, ...] | None = None
    all_to_all_s: float | None = None
    trans_s: float | None = None
    agg_s: float | None = None


def fitted(constants: Constants, samples: Sequence[Sample], *, weight: float = 1.0) -> Constants:
    """Fit seconds of rows, lanes, bytes and messages to what batches took.

    Lines with the smallest sum of absolute residuals (re-weighted least squares), none of their slopes below 0: a
    batch that the machine disturbed counts little. What no sample tells keeps its value; where samples can't tell
    two constants apart (all have as many rows a lane, say) both are scaled alike.

    Args:
        constants: as known so far, with the layer's bytes.
        samples: measured batches.
        weight: of the fit beside what was known, above 0 to 1; below 1 to renew while training.

    Returns:
        The constants.

    Raises:
        ValueError: for a weight out of range, or samples whose sizes don't fit their placements.
    """
    if not 0 < weight <= 1:
        raise ValueError(f"weight={weight} must be above 0 and at most 1; 1 forgets what was known")
    row_s, lane_s = {}, {}
    share = constants.forward_share
    known = {"forward": (constants.forward_row_s, constants.lane_s * share),
             "backward": (constants.backward_s, constants.lane_s * (1 - share))}  # fmt: skip
    for part in ("forward", "backward"):
        row_s[part], lane_s[part] = _line(*_compute_points(constants, samples, part), known[part])
    byte_s, message_s = _line(*_link_points(constants, samples), (constants.byte_s, constants.message_s))

    def mixed(old: float, new: float) -> float:
        return (1 - weight) * old + weight * new

    return replace(
        constants,
        forward_row_s=mixed(constants.forward_row_s, row_s["forward"]),
        backward_row_s=mixed(constants.backward_s, row_s["backward"]),
        lane_s=mixed(constants.lane_s, lane_s["forward"] + lane_s["backward"]),
        byte_s=mixed(constants.byte_s, byte_s),
        message_s=mixed(constants.message_s, message_s),
    )


def _compute_points(constants: Constants, samples: Sequence[Sample], part: str) -> tuple[Floats, Floats]:
    """Rows and lanes, and seconds, of every rank that computed."""
    features, seconds = [], []
    for sample in samples:
        measured = sample.forward_s if part == "forward" else sample.backward_s
        if measured is None:
            continue
        rows = count_rows(*_tables(sample))
        if len(measured) != sample.lanes.num_ranks:
            raise ValueError(
                f"{part}_s of {len(measured)} ranks for a placement of {sample.lanes.num_ranks}: give one value a rank"
            )
        features += list(zip(rows.computed, rows.lanes * constants.num_micro_batches, strict=True))
        seconds += list(measured)
    return np.array(features, dtype=np.float64).reshape(-1, 2), np.array(seconds, dtype=np.float64)


def _link_points(constants: Constants, samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    """Bytes and messages on the fullest link, and seconds, of exchanges, Trans and Agg."""
    features, seconds = [], []
    for sample in samples:
        owner, loads = _tables(sample)
        if sample.all_to_all_s is not None:
            num_bytes = 4 * count_rows(owner, loads).fullest_link * constants.row_bytes
            features.append((num_bytes, 4.0 * constants.num_micro_batches))
            seconds.append(sample.all_to_all_s)
        if sample.trans_s is not None:
            features.append(_transfer_point(constants, count_trans(held(owner)), constants.expert_bytes))
            seconds.append(sample.trans_s)
        if sample.agg_s is not None:
            agg = count_agg(owner, loads, constants.agg)
            features.append(_transfer_point(constants, agg, constants.agg_bytes))
            seconds.append(sample.agg_s)
    return np.array(features, dtype=np.float64).reshape(-1, 2), np.array(seconds, dtype=np.float64)


def _transfer_point(constants: Constants, transfers: Transfers, num_bytes: float) -> tuple[float, float]:
    """The model's own two sums: its seconds if a byte took one and a message none, and the other way round."""
    by_byte = LayerModel(replace(constants, byte_s=1.0, message_s=0.0)).transfer_s(transfers, num_bytes)
    by_message = LayerModel(replace(constants, byte_s=0.0, message_s=1.0)).transfer_s(transfers, num_bytes)
    return by_byte, by_message


def _tables(sample: Sample) -> tuple[Ints, Floats]:
    loads = as_loads(sample.loads)
    sample.lanes.check(*loads.shape)
    return np.array(sample.lanes.owner, dtype=np.int64), loads


def _line(features: Floats, seconds: Floats, known: tuple[float, float]) -> tuple[float, float]:
    """Slopes of two features, no constant: smallest sum of absolute residuals, none below 0."""
    some = features.any(axis=1)
    features, seconds = features[some], seconds[some]
    usable: Flags = np.asarray(features.any(axis=0))
    if not len(seconds) or not usable.all():
        return _one_of(features, seconds, known, usable)
    scale = features.max(axis=0)
    if np.linalg.cond(features / scale) < TELLS_APART:
        found = _least_absolute(features, seconds)
        if (found >= 0).all():
            return float(found[0]), float(found[1])
        return _one_of(features, seconds, (0.0, 0.0), np.asarray(found >= 0))
    told = features @ np.array(known)
    if not told.all():
        return _one_of(features, seconds, known, np.array([True, False]))
    factor = float(np.median(seconds / told))
    return known[0] * factor, known[1] * factor


def _one_of(features: Floats, seconds: Floats, known: tuple[float, float], which: Flags) -> tuple[float, float]:
    """Fit the slope of one feature alone and keep the other; keep both where none is to be fitted."""
    found = list(known)
    for feature in np.flatnonzero(which)[:1]:
        found[feature] = max(0.0, float(_least_absolute(features[:, feature : feature + 1], seconds)[0]))
    return found[0], found[1]


def _least_absolute(features: Floats, seconds: Floats) -> Floats:
    """Re-weighted least squares; deterministic."""
    weights = np.ones(len(seconds))
    floor = 1e-9 * float(np.abs(seconds).max() or 1.0)
    found = np.zeros(features.shape[1])
    scale = np.where(features.any(axis=0), np.abs(features).max(axis=0), 1.0)
    for _ in range(ROUNDS):
        root = np.sqrt(weights)[:, None]
        found = np.linalg.lstsq(features / scale * root, seconds * root[:, 0], rcond=None)[0] / scale
        weights = 1.0 / np.maximum(np.abs(features @ found - seconds), floor)
    return found
