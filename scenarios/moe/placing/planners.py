"""Planners by name: rows of the last batch in, a placement for the next one out. Pure and the same on every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from scenarios.moe.placing.lanes import Lanes
from scenarios.moe.placing.model import LayerModel
from scenarios.moe.placing.rivals import best_subsets, shadowed
from scenarios.moe.placing.search import capped, search, search_routes
from scenarios.moe.placing.traffic import Floats, Ints, as_lanes, as_loads, homes


@dataclass(frozen=True, kw_only=True)
class Known:
    """What a planner may look at besides the last batch.

    Args:
        present: the placement that the layer has, ``[R, E]``.
        earlier: rows of the batch before the last, ``[R, E]``.
        max_copies: of a rank; ``None``: any number.
    """

    present: Ints | None = None
    earlier: Floats | None = None
    max_copies: int | None = None


Planner = Callable[[Floats, LayerModel, Known], Ints]
"""Loads of the last batch ``[R, E]``, the model, what else is known; a placement."""


def plan(
    name: str,
    loads: Any,
    model: LayerModel,
    *,
    present: Lanes | None = None,
    earlier: Any = None,
    max_copies: int | None = None,
) -> Lanes:
    """Place one layer's experts for a batch like the last one.

    Args:
        name: of a planner, a key of :data:`PLANNERS`.
        loads: rows of each source for each expert in the last batch, ``[R, E]``.
        model: what is minimised.
        present: the placement that the layer has, from which ``lanes`` searches, too.
        earlier: rows of the batch before the last, ``[R, E]``; ``lanes`` judges what it found by it, which helps where
            batches differ much.
        max_copies: most experts that a rank may hold besides those it is home to; ``None``: any number.

    Returns:
        The placement. Never predicted slower than static; that of ``lanes`` neither than all local, where
        ``max_copies`` allows it and no ``earlier`` batch says otherwise. ``local`` is all local whatever is predicted.

    Raises:
        ValueError: for an unknown name, fewer than 0 copies, loads that are none, experts that don't divide, a
            present placement for other sizes, or ``local`` with fewer copies than that takes.
    """
    table = as_loads(loads)
    num_ranks, num_experts = table.shape
    static = Lanes.static(num_ranks, num_experts)
    planner = check_planner(name, num_ranks=num_ranks, num_experts=num_experts, max_copies=max_copies)
    if present is not None:
        present.check(num_ranks, num_experts)
    before = None if earlier is None else as_loads(earlier)
    if before is not None:
        static.check(*before.shape)
    if num_ranks == 1:
        return static
    known = Known(
        present=None if present is None else np.array(present.owner, dtype=np.int64),
        earlier=before,
        max_copies=max_copies,
    )
    found = as_lanes(planner(table, model, known))
    if name != "local" and model.seconds(found, table) > model.seconds(static, table):
        return static
    return found


def check_planner(name: str, *, num_ranks: int, num_experts: int, max_copies: int | None) -> Planner:
    """Refuse at start what no batch could plan.

    Args:
        name: of a planner.
        num_ranks: R of the group that shares the experts.
        num_experts: E of a layer.
        max_copies: of a rank; ``None``: any number.

    Returns:
        The planner.

    Raises:
        ValueError: as :func:`plan` does.
    """
    if name not in PLANNERS:
        raise ValueError(f"placement={name!r} is no planner: must be one of {', '.join(PLANNERS)}; choose one of them")
    if max_copies is not None and max_copies < 0:
        raise ValueError(f"max_copies={max_copies} must be 0 or more, or null for any number; 0 is static")
    Lanes.static(num_ranks, num_experts)
    most = num_experts - num_experts // num_ranks
    if name == "local" and max_copies is not None and max_copies < most:
        raise ValueError(
            f"placement='local' copies {most} of {num_experts} experts to each of {num_ranks} ranks, more than "
            f"max_copies={max_copies}: raise max_copies or choose placement='lanes'"
        )
    return PLANNERS[name]


def reroute(lanes: Lanes, loads: Any, model: LayerModel) -> Lanes:
    """Spread a batch's own rows over the copies that there are, without any further Trans.

    Args:
        lanes: the placement whose weights are in place.
        loads: the batch's own rows of each source for each expert, or of its first micro-batch, ``[R, E]``.
        model: what is minimised; Trans counts nothing.

    Returns:
        A placement with no holder that ``lanes`` does not have, never predicted slower than it.

    Raises:
        ValueError: when the placement is for other sizes, or the loads are none.
    """
    table = as_loads(loads)
    lanes.check(*table.shape)
    if not lanes.num_copies:
        return lanes
    return as_lanes(search_routes(model, table, np.array(lanes.owner, dtype=np.int64)))


def _static(loads: Floats, model: LayerModel, known: Known) -> Ints:
    return np.tile(homes(*loads.shape), (len(loads), 1))


def _local(loads: Floats, model: LayerModel, known: Known) -> Ints:
    return np.repeat(np.arange(len(loads))[:, None], loads.shape[1], axis=1)


def _fastermoe(loads: Floats, model: LayerModel, known: Known) -> Ints:
    return capped(shadowed(loads, model), loads, known.max_copies)


def _pro_prophet(loads: Floats, model: LayerModel, known: Known) -> Ints:
    return capped(best_subsets(loads, model), loads, known.max_copies)


def _lanes(loads: Floats, model: LayerModel, known: Known) -> Ints:
    return search(model, loads, present=known.present, earlier=known.earlier, max_copies=known.max_copies)


PLANNERS: dict[str, Planner] = {
    "static": _static, "local": _local, "fastermoe": _fastermoe, "pro_prophet": _pro_prophet, "lanes": _lanes,
}  # fmt: skip
"""By name: homes compute everything; all local; FasterMoE's shadowing; Pro-Prophet's Algorithm 1; our search."""
