"""Which placement is best in the batch that comes next, of which nothing is known but how much the last two differ."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scenarios.moe.placing.model import LayerModel
from scenarios.moe.placing.traffic import Floats, Ints

WORTH = 0.03
"""Share of a layer's seconds by which what is searched must beat the rules it starts from: a search fits what was
routed last closer than a rule does, and that never comes again exactly."""
TURNS = 8
"""Ways in which experts are given each other's changes."""
MOST_CHANGE = 8.0
"""Largest factor between two batches that is believed of an expert."""


def likely(loads: Floats, earlier: Floats) -> list[Floats]:
    """Batches that the next may be like: the one before the last, and the last one changed as much as it was from it.

    How much each expert's rows changed is taken as a draw for any expert, in either direction: every expert is given
    another one's change, in :data:`TURNS` turns. Each source keeps its rows.

    Args:
        loads: rows of every lane in the last batch, ``[R, E]``.
        earlier: the same in the batch before it.

    Returns:
        ``[R, E]`` each; the batch before the last is the first.
    """
    num_experts = loads.shape[1]
    last, before = loads.sum(axis=0), earlier.sum(axis=0)
    known = (last > 0) & (before > 0)
    changes = np.ones(num_experts)
    changes[known] = np.clip(last[known] / before[known], 1 / MOST_CHANGE, MOST_CHANGE)
    rows = loads.sum(axis=1, keepdims=True)
    found = [earlier]
    for turn in range(0, num_experts, max(1, num_experts // TURNS)):
        for factors in (np.roll(changes, turn), 1 / np.roll(changes, turn)):
            changed = loads * factors
            whole = changed.sum(axis=1, keepdims=True)
            found.append(changed * np.divide(rows, whole, out=np.zeros_like(rows), where=whole > 0))
    return found


def judged(model: LayerModel, loads: Floats, earlier: Floats, owner: Ints, rules: Sequence[Ints]) -> Ints:
    """What was searched, if it beats its starts in batches that are likely; else the start that is best there.

    Each batch counts alike, by its share of static's seconds: a batch in which static is slow, where all copies pay,
    must not hide one in which they cost. What is slower than static in one of the last two batches is never taken.

    Args:
        model: what is minimised.
        loads: rows of every lane in the last batch, ``[R, E]``.
        earlier: the same in the batch before it.
        owner: what was found for the last batch, ``[R, E]``.
        rules: what it was found from; static is the first.

    Returns:
        One of them.
    """
    batches = [loads, *likely(loads, earlier)]

    def seconds(placement: Ints) -> Floats:
        return np.array([model.whole(model.parts(placement, batch)) for batch in batches])

    static_s = seconds(rules[0])
    best, least = rules[0], np.inf
    for placement, worth in (*((rule, 0.0) for rule in rules), (owner, WORTH)):
        there_s = seconds(placement)
        if (there_s[:2] > static_s[:2]).any():
            continue
        share = float(np.divide(there_s, static_s, out=np.ones_like(there_s), where=static_s > 0)[1:].mean())
        if share < least * (1 - worth):
            best, least = placement, share
    return best
