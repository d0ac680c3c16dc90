"""How unequal the loads of a pipeline's workers are."""

from __future__ import annotations

import math
from collections.abc import Sequence


def imbalance(loads: Sequence[float]) -> float:
    """Imbalance of some workers' loads: ``(max - min) / mean``.

    Wahib, Soyturk, Unat 2025, "Balanced and Elastic End-to-end Training of Dynamic LLMs", arXiv:2505.14864, section 2,
    Eq. 2. It is 0 for equal loads and at most the number of workers. It is not the bubble ratio: that counts what
    workers wait, fill and drain included, which depends on the largest load and not on the least.

    Args:
        loads: of every worker, in any unit, >= 0.

    Returns:
        The imbalance; 0 where there is no load at all.

    Raises:
        ValueError: for a load that is negative or not finite.
    """
    if any(not 0 <= load < math.inf for load in loads):
        raise ValueError(f"loads = {list(loads)}: must be finite numbers >= 0; leave out what was not measured")
    total = math.fsum(loads)
    return (max(loads) - min(loads)) * len(loads) / total if total else 0.0
