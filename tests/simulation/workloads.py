"""Workloads of all kinds, by chance."""

from __future__ import annotations

import numpy as np

from dynpipe_ds.simulation import Workload

SIZES = [(1, 1), (1, 3), (2, 1), (2, 2), (2, 5), (3, 2), (3, 3), (4, 1), (4, 8), (5, 3), (7, 9), (8, 16)]
"""Stages and micro-batches."""


def random_workload(rng: np.random.Generator, num_stages: int, num_micro_batches: int, *, varying: bool) -> Workload:
    columns = num_micro_batches if varying else 1

    def table(rows: int, scale: float) -> np.ndarray:
        return rng.exponential(scale, (rows, columns))

    return Workload(
        table(num_stages, 1.0), table(num_stages, 2.0), num_micro_batches,
        activation_link_s=table(num_stages - 1, 0.3), gradient_link_s=table(num_stages - 1, 0.3),
        step_s=rng.random(num_stages).tolist(), activation_bytes=rng.integers(0, 9, num_stages).tolist(),
        frozen_boundaries=int(rng.integers(0, num_stages)),
    )
