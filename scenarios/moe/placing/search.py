"""``lanes``: search placements lane by lane, from several starts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scenarios.moe.placing.columns import OUTBOUND
from scenarios.moe.placing.judging import WORTH, judged
from scenarios.moe.placing.model import LayerModel
from scenarios.moe.placing.moves import drops, pulls, sheds
from scenarios.moe.placing.rivals import best_subsets, shadowed
from scenarios.moe.placing.state import State, joined
from scenarios.moe.placing.traffic import Floats, Ints, held, homes

TRIED = 12
"""Moves from each overloaded rank whose seconds are computed exactly in a step."""
LEVELS = (0, 2, 3, 4, 6, 8, 12, 16, 24, 32)
STEPS_FROM_STATIC, STEPS_FROM_OTHERS, STEPS_OF_ROUTES = 256, 64, 24
"""Most steps of a search, whatever it finds."""


@dataclass
class Best:
    """The fastest placement so far; the first of equals.

    Args:
        seconds: of the layer.
        owner: rank of every lane, ``[R, E]``.
    """

    seconds: float
    owner: Ints

    def offer(self, state: State) -> bool:
        """Take a search's present placement if it is faster; return whether it was.

        Args:
            state: the search.
        """
        if state.seconds >= self.seconds * (1 - 1e-12):
            return False
        self.seconds, self.owner = state.seconds, state.owner
        return True


def search(
    model: LayerModel,
    loads: Floats,
    *,
    present: Ints | None = None,
    earlier: Floats | None = None,
    max_copies: int | None = None,
) -> Ints:
    """Search from static, level by level; from all local, thinned; from the rivals'; from the present placement.

    A step looks at every move of one expert's lanes from the ranks that compute, receive or copy most to any other,
    for O(E R^2), and makes the one that lowers the objective most. What is found is never predicted slower than
    static, the present placement, or (if ``max_copies`` allows it and no batch ``earlier`` says otherwise) all local
    and what the rivals' rules give.

    Args:
        model: what is minimised.
        loads: rows of every lane in the last batch, ``[R, E]``.
        present: rank of every lane now, ``[R, E]``.
        earlier: rows of every lane in the batch before the last. What was found for the last batch, and what it was
            found from, are judged by how much the two differ, since the next one will differ about as much.
        max_copies: of a rank; ``None``: any number.

    Returns:
        Rank of every lane, ``[R, E]``.
    """
    static: Ints = np.tile(homes(*loads.shape), (len(loads), 1))
    rules = (shadowed(loads, model), best_subsets(loads, model))
    starts = [static, thinned(model, loads, max_copies), *(capped(rule, loads, max_copies) for rule in rules)]
    if present is not None:
        starts.append(capped(present, loads, max_copies))
    plain = Best(np.inf, static)
    for owner in starts:
        plain.offer(State(model, loads, owner, max_copies))
    best = Best(plain.seconds, plain.owner)
    _climb(State(model, loads, static, max_copies), best)
    for owner in (*starts[1:], best.owner):
        _descend(State(model, loads, owner, max_copies), best, STEPS_FROM_OTHERS)
    found = best if best.seconds < plain.seconds * (1 - WORTH) else plain
    owner = _without_useless(State(model, loads, found.owner, max_copies))
    return owner if earlier is None else judged(model, loads, earlier, owner, starts)


def search_routes(model: LayerModel, loads: Floats, owner: Ints) -> Ints:
    """Search among the ranks that have an expert's weights already: no Trans, whatever is found.

    Args:
        model: what is minimised.
        loads: rows of every lane, ``[R, E]``.
        owner: rank of every lane now, ``[R, E]``.

    Returns:
        Rank of every lane, ``[R, E]``.
    """
    within = held(owner).T
    within[np.arange(loads.shape[1]), homes(*loads.shape)] = True
    best = Best(np.inf, owner)
    for start in (owner, np.tile(homes(*loads.shape), (len(loads), 1))):
        state = State(model, loads, start, within=within)
        best.offer(state)
        _descend(state, best, STEPS_OF_ROUTES)
    return best.owner


def _climb(state: State, best: Best) -> None:
    """Allow more transfers for nothing, level by level, until that no longer finds anything faster."""
    steps, fruitless = STEPS_FROM_STATIC, 0
    for level in LEVELS:
        state.level = level
        state.add_up()
        before = best.seconds
        steps -= _descend(state, best, steps)
        fruitless = 0 if best.seconds < before else fruitless + 1
        if steps <= 0 or (fruitless == 2 and level):
            return


def _descend(state: State, best: Best, steps: int) -> int:
    """Make the best move as long as one is better; return how many were made."""
    for step in range(steps):
        ranks = {int(state.compute.argmax()), int(state.link.argmax()), int(state.copies.argmax())}
        tried = joined(
            [sheds(state, rank, TRIED) for rank in sorted(ranks)]
            + [pulls(state, int(state.totals[OUTBOUND].argmax())), drops(state)]
        )
        if not len(tried):
            return step
        _, objective, sums = state.evaluate(tried)
        which = int(objective.argmin())
        if not objective[which] < state.objective * (1 - 1e-9):
            return step
        state.take(tried, sums, which)
        best.offer(state)
    return steps


def _without_useless(state: State) -> Ints:
    """Give up copies without which the layer is not slower, one by one."""
    for _ in range(int(state.copies.sum())):
        fewer = drops(state)
        seconds, _, sums = state.evaluate(fewer)
        which = int(seconds.argmin())
        if seconds[which] > state.seconds:
            break
        state.take(fewer, sums, which)
    return state.owner


def thinned(model: LayerModel, loads: Floats, max_copies: int | None) -> Ints:
    """All local, but only for the fullest experts, as many as is fastest; all others at home.

    Args:
        model: what is minimised.
        loads: rows of every lane, ``[R, E]``.
        max_copies: of a rank; ``None``: any number.

    Returns:
        Rank of every lane, ``[R, E]``.
    """
    num_ranks, num_experts = loads.shape
    owner = np.tile(homes(num_ranks, num_experts), (num_ranks, 1))
    best = Best(np.inf, owner)
    for expert in np.argsort(-loads.sum(axis=0), kind="stable"):
        owner = owner.copy()
        owner[:, expert] = np.arange(num_ranks)
        best.offer(State(model, loads, capped(owner, loads, max_copies)))
    return best.owner


def capped(owner: Ints, loads: Floats, max_copies: int | None) -> Ints:
    """Give up the copies with fewest rows of every rank that has too many.

    Args:
        owner: rank of every lane, ``[R, E]``.
        loads: rows of every lane, ``[R, E]``.
        max_copies: of a rank; ``None``: any number.

    Returns:
        Rank of every lane, ``[R, E]``.
    """
    if max_copies is None:
        return owner
    owner, home = owner.copy(), homes(*loads.shape)
    for rank, copies in enumerate(held(owner)):
        experts = np.flatnonzero(copies)
        rows = np.where(owner[:, experts] == rank, loads[:, experts], 0.0).sum(axis=0)
        for expert in experts[np.argsort(-rows, kind="stable")][max_copies:]:
            owner[owner[:, expert] == rank, expert] = home[expert]
    return owner
