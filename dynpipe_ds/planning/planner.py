"""The entry: an order for a workload, from list scheduling under several policies, and 1F1B if none is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice, product

from dynpipe_ds.planning.bounds import least_seconds
from dynpipe_ds.planning.listing import Listing, Policy, list_order
from dynpipe_ds.schedule import Order, order_of
from dynpipe_ds.simulation import Simulation, Workload, simulate

EFFORT = 120_000
"""Computations that a planning may look at, about 0.4 seconds; two policies are tried in any case."""

SAME = 1e-9
"""Seconds that differ by a smaller share are the same: sums round."""

_PATIENCES = (0.25, 0.0, 0.5, 1.0)
_SHARES = (0.0, 0.5, 1.0, 0.25, 0.75)  # of the stages that prefer forwards


@dataclass(frozen=True)
class PlannedOrder:
    """An order, and what it promises.

    Args:
        order: what every stage runs.
        simulation: a batch in that order, with sends that are over at once.
        least_s: seconds that no order can beat.
        num_computations: that planning it looked at.
    """

    order: Order
    simulation: Simulation
    least_s: float
    num_computations: int = 0

    @property
    def seconds(self) -> float:
        """Predicted seconds of all forwards and backwards."""
        return self.simulation.makespan_s

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Most bytes of activations that every stage holds."""
        return tuple(stage.peak_activation_bytes for stage in self.simulation.stages)

    @property
    def is_1f1b(self) -> bool:
        """Whether it is DeepSpeed's own order, because no other was faster."""
        return self.order == order_of("1f1b", self.order.num_micro_batches, self.order.num_stages)


def plan_order(
    workload: Workload, activation_caps: int | Sequence[int] | None = None, *, effort: int = EFFORT
) -> PlannedOrder:
    """Plan in which order to run forwards, backwards and weight gradients.

    List scheduling under a memory cap (:mod:`~dynpipe_ds.planning.listing`), with several rules for what a stage
    prefers; the shortest is taken. 1F1B is taken where it is as short and keeps the caps. Weight gradients fill what
    would be idle, as in Qi et al. 2024, "Zero Bubble Pipeline Parallelism"; there the order is fixed for equal stages,
    here it follows the seconds. The first stage that trains runs its whole backward when nothing else is to be done,
    since nobody waits for it. Deterministic.

    Args:
        workload: seconds and bytes of every stage; without ``weight_s`` no backward is split.
        activation_caps: most bytes of activations that a stage may hold, for all or for each; None: the most that
            any stage holds under 1F1B.
        effort: how many computations to look at; about 300,000 a second.

    Returns:
        The order.

    Raises:
        ValueError: when a cap is below what one micro-batch needs.
    """
    return draft_order(workload, activation_caps, effort=effort).finish()


@dataclass(frozen=True)
class Draft:
    """What an order would be, before it is made.

    Args:
        workload: that it is for.
        listing: what ran; ``None``: 1F1B is as short.
        usual: a batch under 1F1B.
        least_s: seconds that no order can beat.
        num_computations: looked at.
        late: of how many layers of each stage the gradients of weights may be done later, as in
            :class:`~dynpipe_ds.schedule.Order`; empty: of all.
    """

    workload: Workload
    listing: Listing | None
    usual: Simulation
    least_s: float
    num_computations: int
    late: tuple[int, ...] = ()

    @property
    def seconds(self) -> float:
        """Of a batch."""
        return self.usual.makespan_s if self.listing is None else self.listing.seconds

    def finish(self) -> PlannedOrder:
        """Make the order, and prove by a run of it that it comes to its end."""
        count, num_stages = self.workload.num_micro_batches, self.workload.num_stages
        if self.listing is None:
            return PlannedOrder(order_of("1f1b", count, num_stages), self.usual, self.least_s, self.num_computations)
        order = self.listing.order(count)
        if any(order.split(stage) for stage in range(num_stages)):
            order = replace(order, late=self.late)
        # To make it and to run it take as long as a listing each.
        looked_at = self.num_computations + 2 * num_computations(num_stages, count)
        return PlannedOrder(order, simulate(self.workload, order), self.least_s, looked_at)


def draft_order(
    workload: Workload, activation_caps: int | Sequence[int] | None = None, *, effort: int = EFFORT,
    late: Sequence[int] = (),
) -> Draft:
    """The same as :func:`plan_order`, but for making the order: to compare many.

    Args:
        workload: as there.
        activation_caps: as there.
        effort: as there.
        late: of the order, see :class:`Draft`; the workload has to say the same.

    Raises:
        ValueError: as there.
    """
    usual = simulate(workload, "1f1b")
    caps = checked_caps(workload, activation_caps, usual)
    least_s = least_seconds(workload)
    listing, looked_at = _shortest(workload, caps, least_s, effort)
    is_usual = fits(usual, caps) and usual.makespan_s <= listing.seconds * (1 + SAME)
    return Draft(workload, None if is_usual else listing, usual, least_s, looked_at, tuple(late))


def _shortest(
    workload: Workload, caps: Sequence[int], least_s: float, effort: int
) -> tuple[Listing, int]:
    """Of several runs, and the computations in them all; of equal ones the first.

    Nothing is shorter than ``least_s``, so the tries end there.
    """
    size = num_computations(workload.num_stages, workload.num_micro_batches)
    policies = first_policies(workload.num_stages, max(2, effort // size))
    best = list_order(workload, caps, policies[0])
    looked_at = best.num_computations
    for policy in policies[1:]:
        if best.seconds <= least_s * (1 + SAME):
            break
        found = list_order(workload, caps, policy, limit_s=best.seconds)
        looked_at += found.num_computations
        if found.seconds < best.seconds:
            best = found
    return best, looked_at


def num_computations(num_stages: int, num_micro_batches: int) -> int:
    """Forwards, backwards and weight gradients of a batch, at most.

    Args:
        num_stages: S.
        num_micro_batches: M.
    """
    return 3 * num_stages * num_micro_batches


def checked_caps(workload: Workload, given: int | Sequence[int] | None, usual: Simulation) -> tuple[int, ...]:
    """Caps of all stages.

    Raises:
        ValueError: when one is below what one micro-batch needs, or there is not one for each stage.
    """
    if given is None:
        given = max(stage.peak_activation_bytes for stage in usual.stages)
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


def fits(simulation: Simulation, caps: Sequence[int]) -> bool:
    """Whether no stage holds more than its cap."""
    return all(stage.peak_activation_bytes <= cap for stage, cap in zip(simulation.stages, caps, strict=True))


def first_policies(num_stages: int, count: int) -> list[Policy]:
    """Some policies, from the one that is the best most often on.

    Args:
        num_stages: S.
        count: how many, if there are so many.
    """
    all_of_them = (
        Policy(round(share * num_stages), patience) for patience, share in product(_PATIENCES, _SHARES)
    )
    return list(islice(dict.fromkeys(all_of_them), count))
