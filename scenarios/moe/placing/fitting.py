"""Constants of the performance model from measured batches: at start, and renewed while training. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from scenarios.moe.placing.constants import Constants, Link
from scenarios.moe.placing.lanes import Lanes
from scenarios.moe.placing.model import LayerModel
from scenarios.moe.placing.traffic import (
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
        layer_s: of the layer, one part after the other.
    """

    lanes: Lanes
    loads: tuple[tuple[float, ...], ...]
    forward_s: tuple[float, ...] | None = None
    backward_s: tuple[float, ...] | None = None
    all_to_all_s: float | None = None
    trans_s: float | None = None
    agg_s: float | None = None
    layer_s: float | None = None


def fitted(constants: Constants, samples: Sequence[Sample], *, weight: float = 1.0) -> Constants:
    """Fit seconds of rows and lanes, of exchanges, of Trans, of Agg, and of what is fixed, to what batches took.

    Each has a line of its own with the smallest sum of absolute residuals (re-weighted least squares), none of its
    slopes below 0: a batch that the machine disturbed counts little. What no sample tells keeps its value; constants
    that no sample tells apart (all have as many rows a lane, say) are scaled alike.

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
    share = constants.forward_share
    known = {"forward": (constants.forward_row_s, constants.lane_s * share),
             "backward": (constants.backward_s, constants.lane_s * (1 - share))}  # fmt: skip
    forward, backward = (_slopes(*_compute_points(constants, samples, part), known[part]) for part in known)
    byte_s, message_s = _slopes(*_exchange_points(constants, samples), (constants.byte_s, constants.message_s))
    trans = _slopes(*_trans_points(constants, samples), _of(constants.trans_link))
    *agg, sum_s = _slopes(*_agg_points(constants, samples), (*_of(constants.sums_link), constants.sum_s))
    (fixed_s,) = _slopes(*_fixed_points(samples), (constants.fixed_s,))

    def mixed(old: float, new: float) -> float:
        return (1 - weight) * old + weight * new

    def link(old: Link, new: Sequence[float]) -> Link | None:
        if list(_of(old)) == list(new):
            return None  # nothing travelled
        byte_s, message_s, start_s = map(mixed, _of(old), new)
        return Link(byte_s=byte_s, message_s=message_s, start_s=start_s)

    return replace(
        constants,
        forward_row_s=mixed(constants.forward_row_s, forward[0]),
        backward_row_s=mixed(constants.backward_s, backward[0]),
        lane_s=mixed(constants.lane_s, forward[1] + backward[1]),
        byte_s=mixed(constants.byte_s, byte_s),
        message_s=mixed(constants.message_s, message_s),
        trans=link(constants.trans_link, trans) or constants.trans,
        agg_link=link(constants.sums_link, agg) or constants.agg_link,
        sum_s=mixed(constants.sum_s, sum_s),
        fixed_s=mixed(constants.fixed_s, fixed_s),
    )


def _of(link: Link) -> tuple[float, float, float]:
    return link.byte_s, link.message_s, link.start_s


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


def _exchange_points(constants: Constants, samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    """Bytes on the fullest link and exchanges, and seconds."""
    features, seconds = [], []
    for sample in samples:
        if sample.all_to_all_s is not None:
            rows = count_rows(*_tables(sample)).fullest_link
            features.append((4 * rows * constants.row_bytes, 4.0 * constants.num_micro_batches))
            seconds.append(sample.all_to_all_s)
    return _points(features, seconds, 2)


def _trans_points(constants: Constants, samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    """Bytes, messages, and whether anything travels, of Trans; and seconds."""
    features, seconds = [], []
    for sample in samples:
        if sample.trans_s is not None:
            owner, _ = _tables(sample)
            features.append(_parts(constants, count_trans(held(owner)), constants.expert_bytes))
            seconds.append(sample.trans_s)
    return _points(features, seconds, 3)


def _agg_points(constants: Constants, samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    """The same of Agg, and 1 for what adding up takes at home."""
    features, seconds = [], []
    for sample in samples:
        if sample.agg_s is not None:
            transfers = count_agg(*_tables(sample), constants.agg)
            features.append((*_parts(constants, transfers, constants.agg_bytes), 1.0))
            seconds.append(sample.agg_s)
    return _points(features, seconds, 4)


def _fixed_points(samples: Sequence[Sample]) -> tuple[Floats, Floats]:
    """What layers took besides all that was measured of them."""
    seconds = []
    for sample in samples:
        if sample.layer_s is None or sample.forward_s is None or sample.backward_s is None:
            continue
        parts = sample.all_to_all_s, max(sample.forward_s), max(sample.backward_s), sample.trans_s, sample.agg_s
        seconds.append(max(0.0, sample.layer_s - sum(part or 0.0 for part in parts)))
    return _points([(1.0,)] * len(seconds), seconds, 1)


def _points(features: Sequence[tuple[float, ...]], seconds: Sequence[float], width: int) -> tuple[Floats, Floats]:
    return np.array(features, dtype=np.float64).reshape(-1, width), np.array(seconds, dtype=np.float64)


def _parts(constants: Constants, transfers: Transfers, num_bytes: float) -> tuple[float, float, float]:
    """The model's own sums: its seconds if a byte, a message or a start took one and the rest none."""
    model = LayerModel(constants)
    by_byte, by_message, by_start = (
        model.transfer_s(transfers, num_bytes, link)
        for link in (Link(byte_s=1.0), Link(byte_s=0.0, message_s=1.0), Link(byte_s=0.0, start_s=1.0))
    )
    return by_byte, by_message, by_start


def _tables(sample: Sample) -> tuple[Ints, Floats]:
    loads = as_loads(sample.loads)
    sample.lanes.check(*loads.shape)
    return np.array(sample.lanes.owner, dtype=np.int64), loads


def _slopes(features: Floats, seconds: Floats, known: Sequence[float]) -> list[float]:
    """Slopes with the smallest sum of absolute residuals, none below 0.

    Features that no sample has keep what is known. Features that are multiples of each other in all samples are scaled
    alike; all are, if the samples can't tell apart what is left.
    """
    found = np.array(known, dtype=np.float64)
    some = features.any(axis=1)
    features, seconds = features[some], seconds[some]
    if not len(seconds):
        return list(map(float, found))
    weights = _alike(features, found)
    columns = features @ weights.T
    if _cannot_tell(columns):
        told = features @ found
        weights = found[None] if told.all() else weights[:1]
        columns = features @ weights.T
    factors = _not_negative(columns, seconds)
    used = weights.any(axis=0)
    found[used] = (factors @ weights)[used]
    return list(map(float, found))


def _alike(features: Floats, known: Floats) -> Floats:
    """Groups of features that are multiples of each other: weights of each group's sum, ``[groups, features]``."""
    groups: list[list[int]] = []
    for feature in np.flatnonzero(features.any(axis=0)):
        for group in groups:
            if _cannot_tell(features[:, [group[0], feature]]):
                group.append(int(feature))
                break
        else:
            groups.append([int(feature)])
    weights = np.zeros((len(groups), features.shape[1]))
    for row, group in zip(weights, groups, strict=True):
        row[group] = known[group]
        if not row.any():
            row[group[0]] = 1.0
    return weights


def _cannot_tell(columns: Floats) -> bool:
    scaled = columns / np.maximum(columns.max(axis=0), 1e-300)
    return min(columns.shape) < columns.shape[1] or bool(np.linalg.cond(scaled) >= TELLS_APART)


def _not_negative(columns: Floats, seconds: Floats) -> Floats:
    """Leave out the most negative slope, which is 0 then, until none is."""
    found, left = np.zeros(columns.shape[1]), list(range(columns.shape[1]))
    while left:
        slopes = _least_absolute(columns[:, left], seconds)
        worth = slopes * columns[:, left].max(axis=0)
        if (worth >= 0).all():
            found[left] = slopes
            break
        del left[int(worth.argmin())]
    return found


def _least_absolute(features: Floats, seconds: Floats) -> Floats:
    """Re-weighted least squares; deterministic."""
    weights = np.ones(len(seconds))
    floor = 1e-9 * float(np.abs(seconds).max() or 1.0)
    found = np.zeros(features.shape[1])
    scale = np.where(features.any(axis=0), np.abs(features).max(axis=0), 1.0)
    for _ in range(ROUNDS):
        root = np.sqrt(weights)[:, None]
        before = found
        found = np.linalg.lstsq(features / scale * root, seconds * root[:, 0], rcond=None)[0] / scale
        if np.allclose(found, before, rtol=1e-9, atol=0.0):
            break
        weights = 1.0 / np.maximum(np.abs(features @ found - seconds), floor)
    return found
