"""What the next batch runs, and what the last one ran: orders and the halves of backwards that they rest on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.halves import Halves
from dynpipe_ds.decide.history import Gains, History
from dynpipe_ds.decide.judgement import Prospect
from dynpipe_ds.decide.orders import OrderedBatch, Orders, least_saving, most_effort
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.partition import Plan
from dynpipe_ds.schedule import Order, split_at_once
from dynpipe_ds.simulation import Workload

NEWS = 0.01
"""Share of the model's time that must have gone from some layers to others since all was decided."""

MUCH_NEWS = 0.05
"""The same, after which planning does not wait, and may be paid for later."""

DEEPER = 4
"""How many times as much may be looked at where all is planned once more without anything new."""


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
        self._settled: list[float] | None = None  # what all was decided by, once it was
        self._searched = 0.0  # computations that the last plan could look at
        self._needed = 0.0  # computations that the next plan must be able to look at, since the last one gained nothing
        self._waiting: OrderedBatch | None = None  # found, pays, and not sure yet
        self._left: OrderedBatch | None = None  # that ran before the last move
        self._paused_until = 0

    @property
    def order(self) -> Order | None:
        """What batches run that are no trial; ``None``: 1F1B."""
        return self._orders.order

    @property
    def num_looked_at(self) -> int:
        """Computations that planning has looked at since the newest batch."""
        return self._orders.spent

    def next(self, *, is_profiled: bool) -> Order | None:
        """What the next batch is to run.

        Args:
            is_profiled: whether it is profiled. A few such batches split backwards only to measure both halves.

        Returns:
            An order; ``None``: 1F1B. The same on every rank.
        """
        newest = self._history.newest
        has_choice = bool(newest) and self._orders.has_choice(newest[-1])
        self._ran = self.order
        self._was_trial = is_profiled and has_choice and self._halves.wants_trial(splits=_splits(self._ran))
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
        self._settled, self._needed, self._waiting = None, 0.0, None

    def failed(self, paused_until: int) -> None:
        """Plan nothing for some batches, and then begin anew, alike on ranks where planning failed and on others.

        Args:
            paused_until: the batch after which to plan again.
        """
        self._orders.failed()
        self._settled, self._needed, self._searched, self._waiting = None, 0.0, 0.0, None
        self._paused_until = paused_until

    def fill(self, profile: PipelineProfile) -> PipelineProfile:
        """Add halves to a profile of whole backwards, where they are known.

        Args:
            profile: of one batch, or of several.
        """
        return self._halves.fill(profile)

    # -- choosing -----------------------------------------------------------------------------

    def is_planned(self) -> bool:
        """Whether orders are planned by now: enough was measured, and there is a choice.

        That is sooner than layers move: an order that was planned from one batch is given up without any cost.
        """
        newest = self._history.newest
        return bool(newest) and self._halves.is_known and self._orders.has_choice(newest[-1])

    def is_due(self) -> bool:
        """Whether to plan now, within planning's share of the time.

        At once where layers have changed. Where they only vary, or nothing is new, a plan that gains nothing lets the
        next one wait until it can look at twice as much: what a short search does not find, a longer one may.
        """
        if not self.is_planned():
            return False
        newest = self._history.newest[-1]
        if newest.batch < self._paused_until:
            return False
        if not self._history.is_complete and self.order is not None:
            return False  # the first decision, on cut and order together, comes soon
        if self._settled is None:
            return self._orders.can_spend(newest, owes=True)
        news = self._news()
        if news > MUCH_NEWS:
            return self._orders.can_spend(newest, owes=True)
        if news > NEWS:
            return self._orders.can_spend(newest, min(most_effort(), self._needed))
        if self._searched >= most_effort():
            return False  # no search looks at more
        return self._orders.can_spend(newest, min(most_effort(), DEEPER * max(self._needed, self._searched)))

    def _news(self) -> float:
        """How much of the time other layers take than when all was decided, as a share; orders that were corrected."""
        if self._settled is None:
            return math.inf
        return sum(abs(new - old) for new, old in zip(self._state(), self._settled, strict=True))

    def _state(self) -> list[float]:
        """What an order depends on: shares of the time, by layer and pass; the correction; micro-batches."""
        profile = self._history.smoothed()
        assert profile is not None, "asked when batches were profiled"
        seconds = [seconds for layer in profile.layers for seconds in (layer.forward_s, layer.backward_s)]
        total_s = sum(seconds) or 1.0
        return [*(each / total_s for each in seconds), self._orders.correction, profile.num_micro_batches]

    @property
    def waiting(self) -> tuple[int, ...] | None:
        """Boundaries of a plan that pays, but was not sure when it was found."""
        return None if self._waiting is None else self._waiting.boundaries

    def wait(self, boundaries: Sequence[int]) -> None:
        """Keep a plan for the batches that will show whether it is right: to find it took long.

        Args:
            boundaries: of the plan.
        """
        if self._orders.knows(boundaries):
            found = self._orders.known(boundaries)
            self._waiting = replace(found, planned=self._orders.written(found))

    def wait_no_more(self) -> None:
        """Forget the plan that waits."""
        self._waiting = None

    def again(self, plan: Plan, profile: PipelineProfile) -> Prospect | None:
        """What the plan that waits promises by now.

        Args:
            plan: its partition.
            profile: with halves; its boundaries are the present partition.

        Returns:
            The prospect; ``None`` where the plan can't be run any more.
        """
        assert self._waiting is not None, "asked where a plan waits"
        found = self._orders.again(profile, self._waiting, self._varying())
        return None if found is None else self._prospect(plan, profile, *found)

    def leave(self, boundaries: Sequence[int]) -> None:
        """Remember what runs on a partition before layers move.

        Args:
            boundaries: the present ones.
        """
        self._left = OrderedBatch(tuple(boundaries), self._orders.order_on(boundaries), 0.0)

    def gains_back(self, profile: PipelineProfile, num_batches: int) -> list[float]:
        """What the partition that was left would have saved of each of the newest batches, in the order that ran there.

        Args:
            profile: with halves; its boundaries are the present partition.
            num_batches: at most.

        Returns:
            Shares; none where it can't be run any more, or batches vary so much that it may be chance.
        """
        batches = list(map(self.fill, self._history.recent(num_batches)))
        found = None if self._left is None else self._orders.again(profile, self._left, batches)
        if found is None:
            return []
        here, there = found
        if there.seconds > here.seconds * (1.0 - least_saving(here.varying_s, there.varying_s)):
            return []
        return [1.0 - there_s / here_s for here_s, there_s in zip(here.varying_s, there.varying_s, strict=True)]

    def can_glance(self) -> bool:
        """Whether there is something new, and time to see what another cut promises; whoever asks does so."""
        return self.is_planned() and self._news() > NEWS and self._orders.can_look()

    def glance(self, plan: Plan, profile: PipelineProfile) -> Prospect | None:
        """What a plan promises if no order is planned for it before it runs.

        Args:
            plan: of another partition than the present one, or of that.
            profile: with halves; its boundaries are the present partition.

        Returns:
            The prospect; ``None`` where the present partition runs 1F1B, too.
        """
        if self._orders.order_on(profile.boundaries) is None:
            return None
        present_s, planned_s = self._orders.glance(profile, plan.boundaries)
        gains = self._history.gains(profile.boundaries, plan.boundaries)
        return Prospect(present_s, planned_s, gains)

    def together(
        self, profile: PipelineProfile, candidates: Sequence[Sequence[int]], pinned: Sequence[int]
    ) -> OrderedBatch:
        """The best partition and order.

        Args:
            profile: with halves.
            candidates: partitions, the present one first.
            pinned: cuts that no partition may have.
        """
        return self._orders.together(profile, candidates, pinned, self._varying())

    def _varying(self) -> list[PipelineProfile]:
        """Batches that plans are tried on where layers vary, with halves."""
        return list(map(self.fill, self._history.varying()))

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
        varying = self._varying()
        present, planned = (self._orders.best(profile, cuts, varying) for cuts in (profile.boundaries, plan.boundaries))
        if present.planned is None and planned.planned is None:
            return None
        return self._prospect(plan, profile, present, planned)

    def _prospect(self, plan: Plan, profile: PipelineProfile, present: OrderedBatch, planned: OrderedBatch) -> Prospect:
        if present.varying_s and planned.varying_s:
            shares = Gains.shares(present.varying_s, planned.varying_s)
            return Prospect(present.seconds, planned.seconds, Gains(shares, min(shares)))
        gain = 1.0 - planned.seconds / present.seconds if present.seconds else 0.0
        weight_shares = self._halves.weight_shares(len(profile.layers))

        def least_s(profiles: Sequence[PipelineProfile], partitions: Sequence[Sequence[int]]) -> list[list[float]]:
            return self._orders.least_s(profiles, partitions, weight_shares)

        gains = self._history.ordered_gains(profile.boundaries, plan.boundaries, least_s, profile, gain)
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
            if profile is not None and tuple(boundaries) != profile.boundaries:
                self._settled = None  # moved at a glance: an order is still to be planned
            return self._orders.order_on(boundaries)
        self._settled = self._state() if self._history.is_complete else None
        best = self._orders.best(profile, boundaries, self._varying())
        least = self._orders.least_effort(profile)
        self._searched = max(least, self._orders.effort + self._orders.spent)
        gains = tuple(boundaries) != profile.boundaries or self._orders.gain > NEWS
        self._needed = 0.0 if gains else max(2 * self._needed, least)
        return self._orders.written(best)

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
        return {
            "halves": self._halves.state_dict(), "orders": self._orders.state_dict(), "settled": self._settled,
            "needed": self._needed, "searched": self._searched, "paused_until": self._paused_until,
            "waiting": _plain(self._waiting), "left": _plain(self._left),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any], *, same_stages: bool) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; empty from an older checkpoint.
            same_stages: whether it comes from as many stages; else only what is known of layers is taken.
        """
        self._halves.load_state_dict(state.get("halves", {}))
        self._orders.load_state_dict(state.get("orders", {}) if same_stages else {})
        self._settled = state.get("settled") if same_stages else None
        self._needed, self._searched = state.get("needed", 0.0), state.get("searched", 0.0)
        self._paused_until = state.get("paused_until", 0) if same_stages else 0
        self._waiting, self._left = (_read(state.get(key)) if same_stages else None for key in ("waiting", "left"))


def _plain(batch: OrderedBatch | None) -> tuple[tuple[int, ...], str | None] | None:
    """A batch whose order is written down, for a checkpoint."""
    if batch is None:
        return None
    return batch.boundaries, None if batch.planned is None else str(batch.planned)


def _read(plain: tuple[Sequence[int], str | None] | None) -> OrderedBatch | None:
    if plain is None:
        return None
    boundaries, order = plain
    return OrderedBatch(tuple(boundaries), None if order is None else Order.parse(order), 0.0)


def _splits(order: Order | None) -> bool:
    """Whether any backward is split."""
    return order is not None and any(order.split(stage) for stage in range(order.num_stages))
