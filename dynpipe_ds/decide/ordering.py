"""What the next batch runs, and what the last one ran: orders and the halves of backwards that they rest on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.halves import Halves
from dynpipe_ds.decide.history import History
from dynpipe_ds.decide.judgement import Prospect
from dynpipe_ds.decide.orders import OrderedBatch, Orders
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition import Plan
from dynpipe_ds.schedule import Order, split_at_once
from dynpipe_ds.simulation import Workload


class Ordering:
    """Orders of batches, as :class:`~dynpipe_ds.decide.Balancer` decides on them.

    Args:
        config: the section.
        history: the newest profiles.
    """

    def __init__(self, config: DynamicPipelineConfig, history: History) -> None:
        self._history = history
        self._halves = Halves()
        self._orders = Orders(config, history.speeds)
        self._ran: Order | None = None
        self._was_trial = False

    @property
    def order(self) -> Order | None:
        """What batches run that are no trial; ``None``: 1F1B."""
        return self._orders.order

    def next(self, *, is_profiled: bool) -> Order | None:
        """What the next batch is to run.

        Args:
            is_profiled: whether it is profiled. A few such batches split backwards only to measure both halves.

        Returns:
            An order; ``None``: 1F1B. The same on every rank.
        """
        newest = self._history.newest
        has_choice = bool(newest) and self._orders.has_choice(newest[-1])
        self._was_trial = is_profiled and has_choice and self._halves.wants_trial()
        self._ran = self.order
        if self._was_trial:
            workload = Workload.from_profile(newest[-1])
            count = workload.num_micro_batches
            every_other = range(self._halves.num_trials % 2, count, 2)
            self._ran = split_at_once(count, workload.num_stages, workload.frozen_boundaries + 1, every_other)
        return self._ran

    def observe(self, profile: PipelineProfile, cost_s: float = 0.0) -> PipelineProfile:
        """Take in a batch that ran what :meth:`next` said, or 1F1B where that does not fit it.

        Args:
            profile: as measured.
            cost_s: seconds that deciding took, as for :meth:`Balancer.observe <dynpipe_ds.decide.Balancer.observe>`.

        Returns:
            The same as if all backwards had run whole.
        """
        size = profile.num_micro_batches, len(profile.boundaries) - 1
        ran = self._ran
        if ran is not None and (ran.num_micro_batches, ran.num_stages) != size:
            ran = None
        is_trial = ran is not None and self._was_trial
        self._orders.observe(profile, ran, is_trial=is_trial, cost_s=cost_s)
        return self._halves.observe(profile, ran, is_trial=is_trial)

    def expect_change(self) -> None:
        """Layers were frozen, replaced or thawed: measure halves anew."""
        self._halves.expect_change()

    def fill(self, profile: PipelineProfile) -> PipelineProfile:
        """Add halves to a profile of whole backwards, where they are known.

        Args:
            profile: of one batch, or of several.
        """
        return self._halves.fill(profile)

    # -- choosing -----------------------------------------------------------------------------

    def is_planned(self) -> bool:
        """Whether orders are planned by now: enough was measured, and there is a choice."""
        newest = self._history.newest
        return self._history.is_complete and self._halves.is_known and self._orders.has_choice(newest[-1])

    def is_due(self) -> bool:
        """Whether to plan now: that would keep within its share of the time."""
        return self.is_planned() and self._orders.is_affordable(self._history.newest[-1])

    def can_look(self) -> bool:
        """Whether there is time to find out what another cut promises; whoever asks does so."""
        return self._orders.can_look()

    def together(
        self, profile: PipelineProfile, candidates: Sequence[Sequence[int]], pinned: Sequence[int]
    ) -> OrderedBatch:
        """The best partition and order.

        Args:
            profile: with halves.
            candidates: partitions, the present one first.
            pinned: cuts that no partition may have.
        """
        return self._orders.together(profile, candidates, pinned)

    def prospect(self, plan: Plan, profile: PipelineProfile) -> Prospect | None:
        """What a plan promises under planned orders.

        Args:
            plan: of another partition than the present one.
            profile: with halves; its boundaries are the present partition.

        Returns:
            The prospect; ``None`` where 1F1B is the best order on both.
        """
        if not self.is_planned() or plan.boundaries == profile.boundaries:
            return None
        present, planned = (self._orders.best(profile, cuts) for cuts in (profile.boundaries, plan.boundaries))
        if present.order is None and planned.order is None:
            return None
        gains = self._history.least_gains(profile.boundaries, plan.boundaries, self._halves.fill)
        return Prospect(present.seconds, planned.seconds, gains)

    def choose(self, profile: PipelineProfile | None, boundaries: Sequence[int]) -> Order | None:
        """The best order for a partition.

        Args:
            profile: with halves; ``None`` before the first batch.
            boundaries: those that the next batch runs on.

        Returns:
            The order to :meth:`adopt`; ``None``: 1F1B. Where none is due, the present one.
        """
        if profile is None or not self.is_planned() or not (self.is_due() or self._orders.knows(boundaries)):
            return self._orders.order_on(boundaries)
        return self._orders.best(profile, boundaries).order

    def adopt(self, order: Order | None, boundaries: Sequence[int]) -> None:
        """Run an order from now on.

        Args:
            order: ``None``: 1F1B.
            boundaries: what it was chosen for.
        """
        self._orders.adopt(order, boundaries)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that it knows, plain values."""
        return {"halves": self._halves.state_dict(), "orders": self._orders.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, same_stages: bool) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; empty from an older checkpoint.
            same_stages: whether it comes from as many stages; else only what is known of layers is taken.
        """
        self._halves.load_state_dict(state.get("halves", {}))
        self._orders.load_state_dict(state.get("orders", {}) if same_stages else {})
