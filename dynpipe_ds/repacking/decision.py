"""How many stages are wanted, which workers run them, and what that brings or costs: pure functions.

:func:`fewest_stages` is this project's decision, :func:`to_stages` an order to be carried out; both go both ways, to
fewer stages and, where workers wait, to more. ``first_fit.py`` has the paper's. Each returns a
:class:`~dynpipe_ds.repacking.outcome.Repacking` or a :class:`~dynpipe_ds.repacking.outcome.Refusal`, the same on every
rank that asks with the same values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from dynpipe_ds.partition import InfeasiblePartitionError
from dynpipe_ds.repacking.outcome import Refusal, Repacking, best_repacking
from dynpipe_ds.repacking.request import Request
from dynpipe_ds.repacking.survivors import choose_survivors, possible_counts

Decide = Callable[[Request], Repacking | Refusal]


@dataclass(frozen=True)
class Wish:
    """What is asked of a number of stages, by the section ``repack``.

    Args:
        tolerance: largest share of the best predicted throughput that may be lost, from 0 up to 1.
        min_gain: what more stages must bring at least, as a share of the present throughput; above
            ``tolerance / (1 - tolerance)``, so that no number is left for one that would be left for it.
        min_stages: fewest stages.
        max_stages: most stages; ``None``: any number.
        horizon_s: seconds over which more stages must make up for the pause.
        pause_s: seconds that training is expected to pause for them.
    """

    tolerance: float
    min_gain: float = math.inf
    min_stages: int = 1
    max_stages: int | None = None
    horizon_s: float = math.inf
    pause_s: float = 0.0


def fewest_stages(request: Request, wish: Wish) -> Repacking | Refusal:
    """The smallest number of stages that reaches, within a tolerance, the best throughput that any number reaches.

    For each number n, at present or with workers that wait, the best partition is the one with the smallest bottleneck
    among those that keep the cap, and the simulator predicts its batch. The best of them all, up to the most stages
    that there ever were workers for, is the measure. One rule goes both ways: a number is *enough* if it loses at most
    the tolerance, and the fewest that are enough are wanted. To fewer stages that is all. To more stages, the best
    throughput must also exceed the present by ``min_gain``, and save more seconds than the pause takes: between both
    shares lies room for noise, in which the present number stays. Fewer stages need not be slower: fill and drain
    shrink.

    Args:
        request: what to decide from.
        wish: what is asked of the number.

    Returns:
        The change, or why the present number of stages stays.
    """
    tried = _Tried(request)
    present_s = tried.seconds(request.num_stages)
    most = min(request.num_stages + request.more_stages, wish.max_stages or request.most_usable, request.most_usable)
    more = {n: tried.seconds(n) for n in range(request.num_stages + 1, most + 1)}
    best_reached_s = min([present_s, *more.values()])
    longest_s = _longest(min(best_reached_s, _once_reached(request, tried, wish)), wish.tolerance)
    fewer = range(max(_fewest_that_could(request, longest_s), wish.min_stages), request.num_stages)
    reason = ""
    best: Repacking | None = None
    for num_stages in fewer:
        found = tried(num_stages)
        if isinstance(found, Refusal):
            reason = reason or found.reason
        elif found.seconds_after <= longest_s:
            return replace(found, reason=f"{found.reason}, the tolerance is {wish.tolerance:.1%}")
        elif best is None or found.seconds_after < best.seconds_after:
            best = found
    if more and present_s > longest_s:
        return _longer(tried, more, present_s, wish)
    if best is not None:
        kept = min(best_reached_s, longest_s * (1 - wish.tolerance)) / best.seconds_after
        return Refusal(
            f"tolerance = {wish.tolerance}: no smaller number of stages keeps {1 - wish.tolerance:.1%} of the "
            f"throughput, {best.num_stages} would keep {kept:.1%}; raise the tolerance or give a target"
        )
    return Refusal(
        reason or f"min_stages = {wish.min_stages}: the pipeline has {request.num_stages}; lower min_stages"
    )


class _Tried:
    """The best that every number of stages can do, each looked for once."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._found: dict[int, Repacking | Refusal] = {}

    def __call__(self, num_stages: int) -> Repacking | Refusal:
        if num_stages not in self._found:
            self._found[num_stages] = _attempt(self._request, num_stages)
        return self._found[num_stages]

    def seconds(self, num_stages: int) -> float:
        """Predicted seconds of a batch; infinite where the number can't be. The present partition is one that can."""
        request, found = self._request, self(num_stages)
        seconds = math.inf if isinstance(found, Refusal) else found.seconds_after
        if num_stages == request.num_stages:
            seconds = min(seconds, request.batch_s(request.current, range(num_stages)))
        return seconds


def _once_reached(request: Request, tried: _Tried, wish: Wish) -> float:
    """What the most workers that there ever were would reach with these layers."""
    most = min(request.most_stages, request.most_usable, wish.max_stages or request.most_stages)
    return min((tried.seconds(n) for n in range(request.num_stages, most + 1)), default=math.inf)


def _longer(tried: _Tried, more: dict[int, float], present_s: float, wish: Wish) -> Repacking | Refusal:
    """Of the numbers above the present one the fewest that nearly reach the best of them, if that is worth it."""
    best_s = min(more.values())
    gain = present_s / best_s - 1.0 if best_s else 0.0
    if gain < wish.min_gain:
        return Refusal(
            f"min_gain = {wish.min_gain}: workers that wait would raise the predicted throughput by {gain:.1%} at most"
        )
    num_stages = min(n for n, seconds in more.items() if seconds <= _longest(best_s, wish.tolerance))
    saved_s = wish.horizon_s * (1.0 - more[num_stages] / present_s)
    if saved_s <= wish.pause_s:
        return Refusal(
            f"horizon of {wish.horizon_s:.3g} s: {num_stages} stages would save {saved_s:.3g} s of it, and the pause "
            f"takes {wish.pause_s:.3g} s"
        )
    found = tried(num_stages)
    assert isinstance(found, Repacking), "its seconds are finite"
    return replace(found, reason=f"{found.reason}, at least {1 + wish.min_gain:.1%} are asked for")


def _longest(best_s: float, tolerance: float) -> float:
    """Longest seconds of a batch that lose at most the tolerance; the one rule of both ways."""
    return best_s / (1.0 - tolerance) * (1 + 1e-9)  # sums round


def to_stages(request: Request, num_stages: int) -> Repacking | Refusal:
    """Go on with exactly so many stages, whatever throughput it costs.

    Which workers stay: of those that the constraints allow, the choice that moves the fewest bytes; where workers
    differ in speed or memory, the fastest, then those with the most memory. More stages than there are layers to put
    on them: as many as can be used.

    Args:
        request: what to decide from.
        num_stages: n, at least 1, other than now, and no more than there are workers for.

    Returns:
        The change, or why it can't be.
    """
    usable = max(request.num_stages, request.most_usable)
    if request.num_stages < num_stages <= request.num_stages + request.more_stages and num_stages > usable:
        if usable == request.num_stages:
            return Refusal(
                f"num_stages = {num_stages}: {_usable_text(request)}; the pipeline has {usable} stages already"
            )
        found = _attempt(request, usable)
        if isinstance(found, Refusal):
            return found
        return replace(found, reason=f"{found.reason}; of {num_stages} stages asked for, {_usable_text(request)}")
    refusal = _refuse_count(request, num_stages)
    return _attempt(request, num_stages) if refusal is None else refusal


def _usable_text(request: Request) -> str:
    count = len(request.profile.layers)
    parts = f"{count} layers" + (f" and {count - request.most_usable} pinned cuts" if request.pinned else "")
    return f"{parts} can use {request.most_usable}"


def _attempt(request: Request, num_stages: int) -> Repacking | Refusal:
    if num_stages < request.num_stages:
        refusal = refuse_fewer(request, num_stages)
        if refusal is not None:
            return refusal
    try:
        return best_repacking(request, num_stages)
    except InfeasiblePartitionError as error:
        hint = _next_hint(request, num_stages) if num_stages < request.num_stages else ""
        return Refusal(f"num_stages = {num_stages}: {error}{hint}")


def _fewest_that_could(request: Request, longest_s: float) -> int:
    """The smallest number of stages that would be fast enough in perfect balance, without fill and drain."""
    profiles = (request.profile, *request.others)
    busy_s = min(profile.num_micro_batches * math.fsum(profile.costs("time")) for profile in profiles)
    speeds = sorted(request.stage_speeds or [1.0] * request.num_stages, reverse=True)
    for num_stages, speed in enumerate(accumulate(speeds[:-1]), start=1):
        if busy_s / speed <= longest_s * (1 + 1e-9):  # sums round
            return num_stages
    return max(1, request.num_stages - 1)


def _refuse_count(request: Request, num_stages: int) -> Refusal | None:
    present, most = request.num_stages, request.num_stages + request.more_stages
    if present < num_stages <= most:
        return None
    if num_stages > most or num_stages == present:
        waiting = f"workers for {request.more_stages} more wait" if request.more_stages else "no workers wait"
        return Refusal(
            f"num_stages = {num_stages}: the pipeline has {present} stages, and {waiting}; give another number from 1 "
            f"to {most}, or start workers with 'dynpipe join' first"
        )
    return refuse_fewer(request, num_stages)


def refuse_fewer(request: Request, num_stages: int) -> Refusal | None:
    """Why a pipeline can't be made so short by any choice of workers; ``None`` if it can.

    Args:
        request: what to decide from.
        num_stages: n.
    """
    if not 1 <= num_stages < request.num_stages:
        return Refusal(
            f"num_stages = {num_stages}: re-packing makes the {request.num_stages} stages fewer; give a number from 1 "
            f"to {request.num_stages - 1}"
            if request.num_stages > 1
            else f"num_stages = {num_stages}: there is one stage, nothing can be given back"
        )
    if choose_survivors(request.workers, request.constraints, num_stages, lambda old, new: ()) is None:
        return Refusal(f"num_stages = {num_stages}: {_constraints_text(request)}{counts_text(request)}")
    return None


def _constraints_text(request: Request) -> str:
    rules = request.constraints
    told = {
        f"ranks {joined(sorted(rules.ranks_stay))} must stay": bool(rules.ranks_stay),
        f"nodes {joined(sorted(rules.nodes_stay))} must stay": bool(rules.nodes_stay),
        f"only whole nodes may go ({joined(request.workers.nodes)} by rank)": rules.whole_nodes,
        "the lowest ranks must stay": rules.lowest_stay,
    }
    return "the release back-end can't give back the others: " + "; ".join(text for text in told if told[text])


def keeping_last(decide: Decide, request: Request, chosen: Repacking) -> Repacking:
    """The same number of stages with the one that reads the labels among them, where that can be.

    Args:
        decide: what chose.
        request: what it decided from.
        chosen: what it chose.
    """
    rules = request.constraints
    with_last = replace(rules, ranks_stay=rules.ranks_stay | set(request.workers.ranks[-1]))
    found = decide(replace(request, constraints=with_last))
    return found if isinstance(found, Repacking) and found.num_stages == chosen.num_stages else chosen


def counts_text(request: Request) -> str:
    """Which smaller numbers of stages the constraints allow, to be added to a message."""
    counts = possible_counts(request.workers, request.constraints)
    if not counts:
        return "; with these constraints no worker can go"
    return f"; numbers of stages that can be reached: {joined(counts)}"


def _next_hint(request: Request, above: int) -> str:
    """The next number of stages that memory allows."""
    for num_stages in possible_counts(request.workers, request.constraints):
        if num_stages > above:
            try:
                best_repacking(request, num_stages)
            except InfeasiblePartitionError:
                continue
            return f"; the next number of stages for which memory suffices is {num_stages}"
    return f"; memory suffices for no number from there to the present {request.num_stages} stages"


def joined(values: Sequence[object]) -> str:
    """Values with commas."""
    return ", ".join(str(value) for value in values)
