"""The entry: an order for a workload, from list scheduling under several policies, and 1F1B if none is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, product
from math import inf

from dynpipe_ds.planning.bounds import least_seconds
from dynpipe_ds.planning.listing import SAME, Listing, Policy, list_order
from dynpipe_ds.schedule import Order, order_of
from dynpipe_ds.simulation import Simulation, Workload, simulate

EFFORT = 120_000
"""Computations that a planning may look at, 0.2 to 0.4 seconds; two policies are tried in any case."""

QUICK = 2
"""Policies that are tried in any case."""

_PATIENCES = (0.25, 0.0, 0.5, 1.0)
_SHARES = (0.0, 0.5, 1.0, 0.25, 0.75)  # of the stages that prefer forwards


@dataclass(frozen=True, eq=False)
class PlannedOrder:
    """An order, and what it promises; written down when it is asked for, since most plans are only compared.

    Args:
        workload: that it is for.
        listing: what ran on paper; ``None``: 1F1B is as short.
        usual: a batch under 1F1B.
        least_s: seconds that no order can beat that keeps the caps.
        num_computations: that planning it looked at.
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
        """Predicted seconds of all forwards and backwards, at most."""
        return self.usual.makespan_s if self.listing is None else self.listing.seconds

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
        return self.usual if self.listing is None else simulate(self.workload, self.order)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Most bytes of activations that every stage holds."""
        return tuple(stage.peak_activation_bytes for stage in self.simulation.stages)


def plan_order(
    workload: Workload, activation_caps: int | Sequence[int] | None = None, *, effort: int = EFFORT,
    late: Sequence[int] = (),
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
        effort: how many computations to look at; 300,000 to 500,000 a second.
        late: of the order, see :class:`PlannedOrder`; the workload has to say the same.

    Returns:
        The order.

    Raises:
        ValueError: when a cap is below what one micro-batch needs.
    """
    return go_on_planning(Tried(), workload, activation_caps, effort=effort, late=late)


def go_on_planning(
    tried: Tried, workload: Workload, activation_caps: int | Sequence[int] | None, *, effort: int, late: Sequence[int]
) -> PlannedOrder:
    """Do as :func:`plan_order` does where some policies were tried before.

    Args:
        tried: what they gave.
        workload: seconds and bytes of every stage.
        activation_caps: most bytes of activations that a stage may hold.
        effort: how many computations to look at.
        late: of the order.
    """
    usual = tried.usual or simulate(workload, "1f1b")
    caps = checked_caps(workload, activation_caps, usual)
    least_s = least_seconds(workload, caps)
    size = num_computations(workload.num_stages, workload.num_micro_batches)
    policies = first_policies(workload.num_stages, max(QUICK, effort // size))
    found = tried.go_on(workload, caps, policies, least_s * (1 + SAME))
    is_usual = fits(usual, caps) and usual.makespan_s <= found.best_s * (1 + SAME)
    looked_at = found.num_computations - tried.num_computations
    return PlannedOrder(workload, None if is_usual else found.best, usual, least_s, looked_at, tuple(late))


@dataclass(frozen=True)
class Tried:
    """What some policies gave for a workload.

    Args:
        usual: a batch under 1F1B, if that is known.
        best: the shortest run; of equal ones the first.
        num_policies: that were tried.
        num_computations: that all runs looked at.
    """

    usual: Simulation | None = None
    best: Listing | None = None
    num_policies: int = 0
    num_computations: int = 0

    @property
    def best_s(self) -> float:
        """Seconds of the shortest run; infinite where there is none."""
        return inf if self.best is None else self.best.seconds

    def go_on(
        self, workload: Workload, caps: Sequence[int], policies: Sequence[Policy], enough_s: float,
        limit_s: float = inf,
    ) -> Tried:
        """Try those of the policies that were not tried yet.

        Args:
            workload: what to run.
            caps: as :func:`checked_caps` has them.
            policies: all of them.
            enough_s: seconds that nothing can be shorter than: one that reaches them ends the tries.
            limit_s: seconds beyond which a run is given up.
        """
        found = self
        for policy in policies[self.num_policies :]:
            if found.best_s <= enough_s:
                break
            listing = list_order(workload, caps, policy, limit_s=min(limit_s, found.best_s))
            found = Tried(
                self.usual, listing if listing.seconds < found.best_s else found.best, len(policies),
                found.num_computations + listing.num_computations,
            )
        return found


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
