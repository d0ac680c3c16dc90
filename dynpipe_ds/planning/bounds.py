"""What no order can beat: seconds that a batch takes at least, for many pipelines at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.placement import Placement
from dynpipe_ds.simulation import Workload
from dynpipe_ds.simulation.workload import FloatArray, frozen_boundaries, links_s

IntArray = npt.NDArray[np.int64]


def least_seconds(workload: Workload, caps: Sequence[int] | None = None) -> float:
    """Seconds that a batch takes at least, in whatever order.

    Args:
        workload: what every stage has to do.
        caps: S most bytes of activations; None: as many as there are.

    Returns:
        A lower bound of the makespan: that of a stage which waits for nothing but what it can't be without.
    """
    weight_s = np.minimum(workload.weight_s, workload.backward_s)
    input_s = workload.backward_s - weight_s  # in whatever order: what a split adds is left out
    count = workload.num_micro_batches
    awaited_s, weights_s = (table.mean(axis=1) * count for table in (workload.forward_s + input_s, weight_s))
    ahead = np.full(workload.num_stages, count)
    if caps is not None:
        ahead = num_ahead(np.array(caps), np.array(workload.activation_bytes), count)
    return float(
        bounds(
            workload.forward_s.min(axis=1), input_s.min(axis=1), awaited_s, weights_s,
            workload.activation_link_s.min(axis=1), np.array(workload.frozen_boundaries),
            gradient_link_s=workload.gradient_link_s.min(axis=1), ahead_s=ahead * workload.forward_s.max(axis=1),
        )
    )


def least_batches_s(
    profiles: Sequence[PipelineProfile], partitions: Sequence[Sequence[int]], caps: Sequence[Sequence[int] | None],
    weight_shares: Sequence[float], *, speeds: Sequence[float] | None = None,
) -> list[list[float]]:
    """The same of many batches on some partitions: :func:`least_seconds` of each workload, but for rounding.

    Args:
        profiles: of as many layers, at unit speed; what they hold is taken to be as in the last.
        partitions: S + 1 layer indices each.
        caps: for each partition, as there.
        weight_shares: of each layer's backward, what gradients of weights take.
        speeds: S relative speeds to divide by.

    Returns:
        Of each partition, seconds of each batch.
    """
    num_stages, newest = len(partitions[0]) - 1, profiles[-1]
    layers_s = np.array([[[layer.forward_s, layer.backward_s] for layer in profile.layers] for profile in profiles])
    forward_s, backward_s = layers_s.transpose(2, 0, 1)
    weight_s = np.array(weight_shares) * backward_s
    until_s = np.insert(np.cumsum([forward_s, backward_s, weight_s], axis=-1), 0, 0.0, axis=-1)
    count = np.array([[profile.num_micro_batches] for profile in profiles])
    links = np.array([np.broadcast_to(links_s(profile, num_stages), num_stages - 1) for profile in profiles])

    def least_s(cuts: Sequence[int], caps: Sequence[int] | None) -> list[float]:
        sums_s = np.maximum(np.diff(until_s[..., list(cuts)], axis=-1), 0.0)
        forward_s, backward_s, weight_s = sums_s / np.array([1.0] * num_stages if speeds is None else speeds)
        weight_s = np.minimum(weight_s, backward_s)
        input_s, ahead = backward_s - weight_s, count
        if caps is not None:
            by_stage = Placement.from_boundaries(cuts).by_stage(newest.activation_bytes())
            ahead = num_ahead(np.array(caps), np.array([sum(held) for held in by_stage]), count)
        frozen = np.array([frozen_boundaries(seconds) for seconds in backward_s.tolist()])
        found: list[float] = bounds(
            forward_s, input_s, count * (forward_s + input_s), count * weight_s, links, frozen, gradient_link_s=links,
            ahead_s=ahead * forward_s,
        ).tolist()  # fmt: skip
        return found

    return [least_s(*each) for each in zip(partitions, caps, strict=True)]


def num_ahead(caps: IntArray, activation_bytes: IntArray, num_micro_batches: int | IntArray) -> IntArray:
    """Forwards that a stage has room for before its first backward.

    Args:
        caps: most bytes of activations, ``(..., S)``.
        activation_bytes: of a micro-batch, ``(..., S)``.
        num_micro_batches: M, the same for all or of each.
    """
    return np.minimum(caps // np.maximum(activation_bytes, 1), num_micro_batches)


def bounds(
    forward_s: FloatArray, input_s: FloatArray, awaited_s: FloatArray, weights_s: FloatArray,
    activation_link_s: FloatArray, frozen_boundaries: IntArray, *, gradient_link_s: FloatArray, ahead_s: FloatArray,
) -> FloatArray:
    """The bound of many pipelines; stages are the last axis.

    A stage can't begin before the first micro-batch has come to it, nor its first backward before the gradient of that
    has come back from the last stage. Until then it is idle when it has computed as many forwards as it has room for.
    It has all its work to do; or all but its weight gradients, after which its last gradient passes through the stages
    before it.

    Args:
        forward_s: least forward seconds of a micro-batch, ``(..., S)``.
        input_s: the same of the backward without weight gradients.
        awaited_s: all seconds of a stage's batch but weight gradients, ``(..., S)``.
        weights_s: all seconds of its weight gradients.
        activation_link_s: least seconds of a message over every boundary, ``(..., S - 1)``.
        frozen_boundaries: ``(...)``.
        gradient_link_s: as for activations.
        ahead_s: most seconds of the forwards that a stage has room for before its first backward, ``(..., S)``.

    Returns:
        ``(...)`` seconds.
    """
    trains = np.arange(forward_s.shape[-1]) >= frozen_boundaries[..., None]
    none_s = np.zeros((*activation_link_s.shape[:-1], 1))
    there_s = np.concatenate([activation_link_s, none_s], axis=-1)
    back_s = np.concatenate([none_s, activation_link_s + gradient_link_s], axis=-1)
    head_s = _before(forward_s + there_s)
    tail_s = _before(np.where(trains, input_s, 0.0))
    returns_s = forward_s + _behind(forward_s + input_s + back_s)
    return np.asarray(stage_bounds(head_s, returns_s, ahead_s, awaited_s, weights_s, tail_s, trains).max(axis=-1))


def stage_bounds(
    head_s: FloatArray, returns_s: FloatArray, ahead_s: FloatArray, awaited_s: FloatArray, weights_s: FloatArray,
    tail_s: FloatArray, trains: npt.NDArray[np.bool_],
) -> FloatArray:
    """The bound of single stages: seconds from the beginning of the batch to its end.

    Proof. The stage is idle for ``head_s``, until its first activation comes. The first backward needs a gradient that
    comes back no earlier than ``returns_s`` after that; the stage has computed ``ahead_s`` at most by then, and can do
    nothing else. All but weight gradients takes ``awaited_s``. Behind the last of that, either all weight gradients
    are done, or some are still to be done: in both cases the stage is busy with them for ``weights_s`` in all. And the
    gradient that it computed last has ``tail_s`` to go. Nothing of this rests on an order.

    Args:
        head_s: least seconds until the first activation comes.
        returns_s: least seconds from then on until its gradient comes back.
        ahead_s: most seconds of forwards that there is room for before the first backward.
        awaited_s: all seconds of the stage's batch but weight gradients.
        weights_s: all seconds of its weight gradients.
        tail_s: least seconds that its last gradient takes through the stages before it.
        trains: whether it has a backward.

    Returns:
        Seconds, of the shape that the arguments have together.
    """
    idle_s = np.where(trains, np.maximum(returns_s - ahead_s, 0.0), 0.0)
    return np.asarray(head_s + idle_s + awaited_s + np.maximum(weights_s, tail_s))


def _before(seconds: FloatArray) -> FloatArray:
    """Sums over all stages before each."""
    return np.asarray(np.cumsum(seconds, axis=-1) - seconds)


def _behind(seconds: FloatArray) -> FloatArray:
    """Sums over all stages after each."""
    return np.asarray(seconds.sum(axis=-1, keepdims=True) - np.cumsum(seconds, axis=-1))
