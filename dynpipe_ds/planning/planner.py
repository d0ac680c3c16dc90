"""The entry: an order for a workload, from list scheduling by several rules, and 1F1B if none is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from statistics import fmean

from dynpipe_ds.planning.bounds import least_seconds
from dynpipe_ds.planning.justified import justified
from dynpipe_ds.planning.listing import Listing, Policy, list_order, work_of
from dynpipe_ds.planning.retimed import AS_LONG, retimed_s, usual_s
from dynpipe_ds.planning.runs import SAME, Work
from dynpipe_ds.schedule import Order, order_of
from dynpipe_ds.schedule.makers import in_flight
from dynpipe_ds.simulation import Simulation, Timetable, Workload, simulate
from dynpipe_ds.simulation.compiled import compile_loops, is_compiled

EFFORT = 120_000
"""Computations that a planning may look at, 0.2 to 0.4 seconds; one rule is tried in any case."""


@dataclass(frozen=True)
class Rule:
    """How a run is made.

    Args:
        policy: what it is listed under.
        patiences: of each time that it is pushed to its end and back then, one from where the other has led.
    """

    policy: Policy
    patiences: tuple[float, ...]

    @property
    def num_runs(self) -> int:
        """Runs of a batch that it takes."""
        return 1 + 2 * len(self.patiences)


_FIRST, _PUSHES = Policy(prefers_forwards=True, patience=0.15, depth=1.5), (0.35, 0.75, 1.0)
QUICKEST = Rule(_FIRST, _PUSHES[1:2])
"""Of rules that push."""
RULES = (
    Rule(_FIRST, ()), QUICKEST, Rule(_FIRST, _PUSHES[:2]), Rule(_FIRST, _PUSHES),
    *(Rule(Policy(prefers_forwards=False, patience=0.5, depth=depth), _PUSHES) for depth in (1.0, 1.5)),
)  # fmt: skip
"""The more runs they take, the more they add. On the load models with 16 and 24 stages, the first one is 0.8% longer
than the best of 20 policies that are not pushed, the next three 0.6% to 0.8%, 0.8% to 1.1% and 1.0% to 1.1% shorter.
Other policies add 0.1%, but more where stages are few. Twelve more pushes add 0.1% to 0.3%, too."""

_HOPELESS = 1.05  # times the limit: pushing seldom makes a run shorter by more


@dataclass(frozen=True, eq=False)
class PlannedOrder:
    """An order, and what it promises; written down when it is asked for, since most plans are only compared.

    Args:
        workload: that it is for.
        listing: what ran on paper; ``None``: 1F1B is as short.
        usual_s: seconds under 1F1B.
        least_s: seconds that no order can beat that keeps the caps.
        num_computations: that planning it looked at.
        late: of how many layers of each stage the gradients of weights may be done later, as in
            :class:`~dynpipe_ds.schedule.Order`; empty: of all.
        varying_s: seconds of each of the batches that the workload is the mean of, in this order; empty where none
            were given.
    """

    workload: Workload
    listing: Listing | None
    usual_s: float
    least_s: float
    num_computations: int
    late: tuple[int, ...] = ()
    varying_s: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """Predicted seconds of all forwards and backwards, at most; of batches that vary, on average."""
        if self.varying_s:
            return fmean(self.varying_s)
        return self.usual_s if self.listing is None else self.listing.seconds

    @property
    def is_1f1b(self) -> bool:
        """Whether it is DeepSpeed's own order, because no other was faster."""
        return self.listing is None

    @cached_property
    def order(self) -> Order:
        """What every stage runs."""
        count, num_stages = self.workload.num_micro_batches, self.workload.num_stages
        if self.listing is None:
            return order_of("1f1b", count, num_stages)
        order = self.listing.order(count)
        return replace(order, late=self.late) if self.late and any(map(order.split, range(num_stages))) else order

    @cached_property
    def simulation(self) -> Simulation:
        """A batch in that order, with sends that are over at once; proves that it comes to its end."""
        return simulate(self.workload, "1f1b" if self.listing is None else self.order)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Most bytes of activations that every stage holds."""
        return tuple(stage.peak_activation_bytes for stage in self.simulation.stages)


def plan_order(
    workload: Workload, activation_caps: int | Sequence[int] | None = None, *, effort: int = EFFORT,
    late: Sequence[int] = (), varying: Sequence[Workload] = (),
) -> PlannedOrder:
    """Plan in which order to run forwards, backwards and weight gradients.

    List scheduling under a memory cap (:mod:`~dynpipe_ds.planning.listing`), whose runs are pushed to their end and
    back (:mod:`~dynpipe_ds.planning.justified`), by several rules; the shortest is taken. 1F1B is taken where it is as
    short and keeps the caps. Weight gradients fill what would be idle, as in Qi et al. 2024, "Zero Bubble Pipeline
    Parallelism"; there the order is fixed for equal stages, here it follows the seconds. The first stage that trains
    runs its whole backward when nothing else is to be done, since nobody waits for it. Deterministic.

    Args:
        workload: seconds and bytes of every stage; without ``weight_s`` no backward is split.
        activation_caps: most bytes of activations that a stage may hold, for all or for each; None: the most that
            any stage holds under 1F1B.
        effort: how many computations to look at; 400,000 a second or so, compiled 4 million.
        late: of the order, see :class:`PlannedOrder`; the workload has to say the same.
        varying: batches that the workload is the mean of. The order that is the shortest for their mean may be a long
            one for each of them, so each order is timed with all of them.

    Returns:
        The order.

    Raises:
        ValueError: when a cap is below what one micro-batch needs.
    """
    caps = checked_caps(workload, activation_caps)
    enough_s = least_seconds(workload, caps) * (1 + SAME)
    size = num_computations(workload.num_stages, workload.num_micro_batches)
    tried, work, others = Tried(), work_of(workload, caps), [work_of(batch, caps) for batch in varying]
    for rule in rules_within(effort / (size + len(varying) * size / AS_LONG)):
        if tried.best_s <= enough_s:
            break
        tried = tried.under(rule, work, varying=others)
    return tried.planned(workload, caps, [work, *others], late=late)


_WORTH_COMPILING = 300  # computations of a batch


def is_worth_compiling(num_stages: int, num_micro_batches: int) -> bool:
    """Say whether batches are so large that planning takes most of its time for what can be compiled.

    Args:
        num_stages: S.
        num_micro_batches: M.

    Returns:
        Whether they are.
    """
    return num_computations(num_stages, num_micro_batches) >= _WORTH_COMPILING


def compile_planning() -> bool:
    """Compile what planning spends its time with, where Numba is installed: the same plans in a small part of the time.

    Takes ten seconds or so, a second where that was compiled before, and about 110 MB of memory.

    Returns:
        Whether it is compiled; for :func:`~dynpipe_ds.planning.agree_on_pace`.
    """
    return is_compiled() or compile_loops(_call_all_loops)


def _call_all_loops() -> None:
    workload = Workload([1.0, 1.0], [2.0, 2.0], 2, weight_s=[1.0, 1.0])
    timetable = Timetable(plan_order(workload, varying=[workload]).order)
    timetable.makespan_s(workload)
    timetable.peak_bytes(workload)


def seconds_of_1f1b(mean_s: float, varying: Sequence[Work], limit_s: float) -> tuple[float, ...] | None:
    """Seconds of batches that vary under 1F1B, if it is no longer than a limit; timed only if it may be.

    Args:
        mean_s: of the mean of them.
        varying: the batches.
        limit_s: on average.
    """
    if mean_s > limit_s:
        return None
    seconds = tuple(map(usual_s, varying))
    return seconds if not seconds or fmean(seconds) <= limit_s else None


@dataclass(frozen=True)
class Tried:
    """What some policies gave for a workload.

    Args:
        best: the shortest run; of equal ones the first.
        varying_s: seconds of each of the batches that vary, in the sequence of that run.
        num_computations: that all runs looked at.
    """

    best: Listing | None = None
    varying_s: tuple[float, ...] = ()
    num_computations: int = 0

    @property
    def best_s(self) -> float:
        """Seconds of the shortest run, of batches that vary on average; infinite where there is none."""
        if self.varying_s:
            return fmean(self.varying_s)
        return inf if self.best is None else self.best.seconds

    def under(self, rule: Rule, work: Work, limit_s: float = inf, *, varying: Sequence[Work] = ()) -> Tried:
        """Try one more.

        Args:
            rule: that was not tried yet.
            work: what to run.
            limit_s: seconds beyond which a run is given up.
            varying: batches that the work is the mean of.

        Returns:
            The same with that one, and the computations that it looked at.
        """
        limit_s = min(limit_s, self.best_s) * (_HOPELESS if rule.patiences else 1.0)
        listing = list_order(work, rule.policy, limit_s=limit_s)
        tried = self._with(listing, listing.num_computations, varying)
        for patience in rule.patiences if listing.seconds < inf else ():
            listing = justified(listing, work, patience)
            tried = tried._with(listing, 2 * listing.num_computations, varying)
        return tried

    def _with(self, listing: Listing, looked_at: int, varying: Sequence[Work]) -> Tried:
        """The same with one more run, for which so many computations were looked at."""
        found = Tried(listing, num_computations=self.num_computations + looked_at)
        is_new = listing.seconds < self.best_s and (self.best is None or not self.best.is_as(listing))
        if varying and is_new:
            varying_s = tuple(retimed_s(listing, batch) for batch in varying)
            looked_at = found.num_computations + len(varying) * listing.num_computations // AS_LONG
            found = replace(found, varying_s=varying_s, num_computations=looked_at)
        is_better = is_new and found.best_s < self.best_s
        return found if is_better else replace(self, num_computations=found.num_computations)

    def planned(
        self, workload: Workload, caps: Sequence[int], works: Sequence[Work], *, late: Sequence[int],
    ) -> PlannedOrder:
        """The shortest run, or 1F1B where that is as short and keeps the caps.

        Args:
            workload: that was tried.
            caps: the same.
            works: of it, and of each batch that it is the mean of.
            late: of the order.
        """
        mean_s, best, varying_s = usual_s(works[0]), self.best, self.varying_s
        if fits_1f1b(workload.activation_bytes, workload.num_micro_batches, caps):
            of_1f1b = seconds_of_1f1b(mean_s, works[1:], self.best_s * (1 + SAME))
            best, varying_s = (best, varying_s) if of_1f1b is None else (None, of_1f1b)
        least_s = least_seconds(workload, caps)
        return PlannedOrder(workload, best, mean_s, least_s, self.num_computations, tuple(late), varying_s)


def num_computations(num_stages: int, num_micro_batches: int) -> int:
    """Forwards, backwards and weight gradients of a batch, at most.

    Args:
        num_stages: S.
        num_micro_batches: M.
    """
    return 3 * num_stages * num_micro_batches


def rules_within(num_runs: float, least: Rule = RULES[0]) -> tuple[Rule, ...]:
    """Rules to try, of those with one policy that which pushes the most.

    Args:
        num_runs: of a batch, that all of them may take.
        least: what is taken in any case, or one that pushes more instead of it.
    """
    found: tuple[Rule, ...] = (least,)
    for rule in RULES[RULES.index(least) + 1 :]:
        wanted = (*(one for one in found if one.policy != rule.policy), rule)
        if sum(one.num_runs for one in wanted) <= num_runs:
            found = wanted
    return found


def checked_caps(workload: Workload, given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Caps of all stages.

    Raises:
        ValueError: when one is below what one micro-batch needs, or there is not one for each stage.
    """
    if given is None:
        given = max(_peaks_of_1f1b(workload.activation_bytes, workload.num_micro_batches))
    caps = (given,) * workload.num_stages if isinstance(given, int) else tuple(given)
    if len(caps) != workload.num_stages:
        raise ValueError(f"activation_caps = {caps}: need one number, or one for each of {workload.num_stages} stages")
    for stage, (cap, needed) in enumerate(zip(caps, workload.activation_bytes, strict=True)):
        if cap < needed:
            raise ValueError(
                f"activation_caps of stage {stage} is {cap:,} bytes: must be at least the {needed:,} that one "
                "micro-batch holds there; raise the cap or make micro-batches smaller"
            )
    return caps


def fits_1f1b(activation_bytes: Sequence[int], num_micro_batches: int, caps: Sequence[int]) -> bool:
    """Whether no stage holds more than its cap under 1F1B.

    Args:
        activation_bytes: S numbers, of a micro-batch.
        num_micro_batches: M.
        caps: S most bytes of activations.
    """
    peaks = _peaks_of_1f1b(activation_bytes, num_micro_batches)
    return all(peak <= cap for peak, cap in zip(peaks, caps, strict=True))


def _peaks_of_1f1b(activation_bytes: Sequence[int], num_micro_batches: int) -> list[int]:
    num_stages = len(activation_bytes)
    return [
        num_bytes * in_flight("1f1b", num_micro_batches, num_stages, stage)
        for stage, num_bytes in enumerate(activation_bytes)
    ]
