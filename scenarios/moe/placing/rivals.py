"""Planners of others, by their published rules: FasterMoE's shadowing and Pro-Prophet's greedy search."""

from __future__ import annotations

import numpy as np

from scenarios.moe.placing.model import LayerModel
from scenarios.moe.placing.traffic import Floats, Ints, count_rows, homes

ALPHA = 0.5
"""Default of the paper's coefficient of balance, which it leaves to the user."""
SUBSETS_TRIED = 8
"""Numbers of devices left out that are tried."""


def shadowed(loads: Floats, model: LayerModel) -> Ints:
    """FasterMoE's dynamic shadowing: the fullest experts are local everywhere.

    He et al., "FasterMoE", PPoPP 2022, section 4.2, by the formula in its published code (FastMoE's shadow policy):
    experts by falling rows B; one more is shadowed as long as 3 forwards and 4 exchanges of the fullest *expert* that
    is left, plus one transfer for each that is shadowed, take less than before.

    Args:
        loads: rows of every lane, ``[R, E]``.
        model: for the seconds of a row, of its transfer and of an expert's.

    Returns:
        Rank of every lane, ``[R, E]``.
    """
    constants = model.constants
    num_ranks, num_experts = loads.shape
    rows = loads.sum(axis=0)
    row_s = 3 * constants.forward_row_s + 4 * constants.row_bytes * constants.byte_s
    order = np.argsort(-rows, kind="stable")
    owner = np.tile(homes(num_ranks, num_experts), (num_ranks, 1))
    least_s, shadows_s = float(rows[order[0]]) * row_s, 0.0
    for expert, following in zip(order, order[1:], strict=False):
        shadows_s += constants.expert_bytes * constants.trans_link.byte_s
        there_s = float(rows[following]) * row_s + shadows_s
        if there_s >= least_s:
            break
        least_s = there_s
        owner[:, expert] = np.arange(num_ranks)
    return owner


def best_subsets(loads: Floats, model: LayerModel) -> Ints:
    """Pro-Prophet's Algorithm 1 for several numbers of devices left out, since the paper leaves n to the user.

    Args:
        loads: rows of every lane, ``[R, E]``.
        model: which of them is fastest, by our model of links, not the paper's.

    Returns:
        Rank of every lane, ``[R, E]``.
    """
    step = max(1, len(loads) // SUBSETS_TRIED)
    found = [subsets(loads, model, left_out=left_out) for left_out in range(0, len(loads), step)]
    return min(found, key=lambda owner: model.whole(model.parts(owner, loads)))


def subsets(loads: Floats, model: LayerModel, *, left_out: int, alpha: float = ALPHA) -> Ints:
    """Pro-Prophet's Algorithm 1: the fullest experts are local on the devices that hold most of their inputs.

    Section IV-C. From no copies at all, the expert with most inputs goes to all devices but the ``left_out`` with
    fewest of its inputs; then the next one, until H, the inputs that devices compute, are balanced (equation 7:
    ``max H - min H < alpha I / E``) or all experts went. Of the placements on the way, the one that the paper's
    own model says is fastest is taken: its equations 1 to 6, or 8 where transfers run beside computation.

    Args:
        loads: rows of every lane, ``[R, E]``.
        model: for the constants, and whether transfers are overlapped.
        left_out: n, devices that an expert is not sent to.
        alpha: of equation 7.

    Returns:
        Rank of every lane, ``[R, E]``.
    """
    num_ranks, num_experts = loads.shape
    owner: Ints = np.tile(homes(num_ranks, num_experts), (num_ranks, 1))
    best: Ints = owner.copy()
    computed, received = _rows(owner, loads)
    least_s = _papers_s(computed, received, 0, left_out, model)
    bound = alpha * float(loads.sum()) / num_experts  # equation 7
    for count, expert in enumerate(np.argsort(-loads.sum(axis=0), kind="stable"), start=1):
        if computed.max() - computed.min() < bound:
            break
        most_first = np.argsort(-loads[:, expert], kind="stable")
        devices = most_first[: num_ranks - left_out]
        owner[devices, expert] = devices
        computed, received = _rows(owner, loads)
        there_s = _papers_s(computed, received, count, left_out, model)
        if there_s < least_s:
            least_s, best = there_s, owner.copy()
    return best


def _rows(owner: Ints, loads: Floats) -> tuple[Floats, Floats]:
    """H and R: inputs that each device computes, and receives from others."""
    rows = count_rows(owner, loads)
    return rows.computed, rows.inbound


def _papers_s(computed: Floats, received: Floats, num_moved: int, left_out: int, model: LayerModel) -> float:
    """Seconds of the layer by the paper's model, where every device has a mean share of Trans and Agg."""
    constants, num_ranks = model.constants, len(computed)
    exchange_s = float(received.max()) * constants.row_bytes * constants.byte_s  # equation 1
    forward_s = float(computed.max()) * constants.forward_row_s  # equation 2
    backward_s = float(computed.max()) * constants.backward_s  # equation 3
    sent = num_moved * (num_ranks - left_out) / num_ranks
    trans_s = sent * constants.expert_bytes * constants.trans_link.byte_s  # equation 4
    agg_s = sent * constants.agg_bytes * constants.sums_link.byte_s  # equation 5
    if model.overlapped:  # equation 8
        trans_s = max(0.0, trans_s - forward_s - constants.rest_forward_s)
        agg_s = max(0.0, agg_s - backward_s - constants.rest_backward_s)
    return 4 * exchange_s + forward_s + backward_s + trans_s + agg_s  # equation 6
