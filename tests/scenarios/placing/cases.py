"""Loads and constants that the tests of placing share."""

from __future__ import annotations

from typing import Any

import numpy as np

from scenarios.moe.placing import Constants

Table = np.ndarray

MEDIUM: dict[str, Any] = {  # an expert of 1024 x 2048 in fp32 at 10 TFLOP/s and 3 GB/s
    "forward_row_s": 8.4e-7, "row_bytes": 4096.0, "byte_s": 1 / 3e9, "expert_bytes": 2.0**24, "message_s": 1e-5,
    "piece_bytes": 2.0**20, "rest_forward_s": 1e-3, "rest_backward_s": 2e-3,
}  # fmt: skip


def constants(**changes: Any) -> Constants:
    return Constants(**{**MEDIUM, **changes})


def skewed(num_ranks: int, num_experts: int, seed: int, rows: int = 1024) -> Table:
    """Rows of each source by a Zipf law of 1.1, the order of the experts drawn."""
    draw = np.random.default_rng(seed)
    share = 1 / np.arange(1, num_experts + 1) ** 1.1
    share = draw.permutation(share / share.sum())
    return draw.multinomial(rows, np.tile(share, (num_ranks, 1)))


def any_owner(num_ranks: int, num_experts: int, seed: int) -> Table:
    return np.random.default_rng(seed).integers(0, num_ranks, (num_ranks, num_experts))
