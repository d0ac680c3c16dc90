"""What no order can beat: seconds that a batch takes at least, for many pipelines at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dynpipe_ds.simulation import Workload
from dynpipe_ds.simulation.workload import FloatArray

IntArray = npt.NDArray[np.int64]


def least_seconds(workload: Workload) -> float:
    """Seconds that a batch takes at least, in whatever order.

    Args:
        workload: what every stage has to do.

    Returns:
        A lower bound of the makespan: that of a stage which waits for nothing after its first forward.
    """
    weight_s = np.minimum(workload.weight_s, workload.backward_s)
    input_s = workload.backward_s - weight_s  # in whatever order: what a split adds is left out
    awaited_s, weights_s = (
        table.mean(axis=1) * workload.num_micro_batches for table in (workload.forward_s + input_s, weight_s)
    )
    return float(
        bounds(
            workload.forward_s.min(axis=1), input_s.min(axis=1), awaited_s, weights_s,
            workload.activation_link_s.min(axis=1), np.array(workload.frozen_boundaries),
        )
    )


def bounds(
    forward_s: FloatArray, input_s: FloatArray, awaited_s: FloatArray, weights_s: FloatArray,
    activation_link_s: FloatArray, frozen_boundaries: IntArray,
) -> FloatArray:
    """The bound of many pipelines; stages are the last axis.

    A stage can't begin before the first micro-batch has come to it. Then it has all its work to do; or all but its
    weight gradients, after which its last gradient passes through the stages before it.

    Args:
        forward_s: least forward seconds of a micro-batch, ``(..., S)``.
        input_s: the same of the backward without weight gradients.
        awaited_s: all seconds of a stage's batch but weight gradients, ``(..., S)``.
        weights_s: all seconds of its weight gradients.
        activation_link_s: least seconds of a message over every boundary, ``(S - 1,)``.
        frozen_boundaries: ``(...)``.

    Returns:
        ``(...)`` seconds.
    """
    trains = np.arange(forward_s.shape[-1]) >= frozen_boundaries[..., None]
    head_s = _before(forward_s + np.append(activation_link_s, 0.0))
    tail_s = _before(np.where(trains, input_s, 0.0))
    return np.asarray((head_s + awaited_s + np.maximum(weights_s, tail_s)).max(axis=-1))


def _before(seconds: FloatArray) -> FloatArray:
    """Sums over all stages before each."""
    return np.asarray(np.cumsum(seconds, axis=-1) - seconds)
