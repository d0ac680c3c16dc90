"""In which order to run a batch: 1F1B, or one planned from measured seconds, whichever is faster by prediction.

A prediction leaves out what it does not know: messages, noise, what computing side by side costs. So what batches
took is set beside what was predicted for them, under either kind of order, and the predictions are corrected by it
before they are compared: an order that only looks faster is given up.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.speeds import Speeds
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.planning import (
    PlannedOrder,
    activation_caps,
    plan_batch,
    plan_on_partition,
    worker_bytes_of_1f1b,
)  # fmt: skip
from dynpipe_ds.planning.bounds import least_batches_s
from dynpipe_ds.planning.listing import work_of
from dynpipe_ds.planning.pace import pace
from dynpipe_ds.planning.planner import EFFORT, num_computations
from dynpipe_ds.planning.retimed import AS_LONG, usual_s
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import Workload, simulate
from dynpipe_ds.simulation.timetable import Timetable

LEAST_GAIN = 0.01
"""Share of a batch that a planned order must save for ``"auto"``."""

SHARE_OF_TIME = 0.007
"""Of the training time, what planning may take; glances, and what any decision takes, come to 0.1 to 0.3%."""

FIRST_S = 0.015
"""Seconds that planning may take before it has earned any."""

MOST_S = 0.1
"""Seconds that one plan may take where planning is compiled; twice as many are saved up where nothing is planned."""

AS_GOOD = 0.002
"""Share of a batch that a new order must save: else the present one goes on."""

CHANCE = 2.0
"""Standard errors of the mean over batches that vary, by which a new order must save at least."""

_PLANS_MEASURED = 2  # that take as much at least, for their rate: with less, something else takes the time
_LEAST_SEARCH = 4  # times the computations of a batch
_OWED = 15  # times the computations of a batch: about what one decision looks at
_NEWEST = 8  # batches that a correction is taken from


@dataclass(frozen=True)
class OrderedBatch:
    """A partition, the order to run it in, and the seconds that are predicted.

    Args:
        boundaries: S + 1 layer indices.
        planned: what to run; an order that ran before, or a plan whose order is not written down yet; ``None``: 1F1B.
        seconds: of a batch, corrected by what batches have taken; of batches that vary, on average.
        varying_s: of each of these.
    """

    boundaries: tuple[int, ...]
    planned: Order | PlannedOrder | None
    seconds: float
    varying_s: tuple[float, ...] = ()


class Orders:
    """Plans orders and says which one to run.

    Args:
        config: the section.
        speeds: of the workers.

    Attributes:
        order: to run; ``None``: 1F1B.
        effort: computations that may be looked at now; negative: what was planned is not paid for yet.
        spent: computations that were looked at since the newest batch.
        gain: of the best order found since then on the present partition over the present one, as a share.
    """

    def __init__(self, config: DynamicPipelineConfig, speeds: Speeds) -> None:
        self._config, self._speeds = config, speeds
        self.order: Order | None = None
        self._chosen_for: tuple[int, ...] = ()
        self._excess: dict[bool, deque[float]] = {kind: deque(maxlen=_NEWEST) for kind in (False, True)}
        self._start: tuple[int, ...] | None = None
        self._worker_bytes = 0
        self._candidates: list[tuple[int, ...]] = []  # of the last search of both: what they hold, its plan may hold
        self.effort = 0.0
        self._rates: deque[float] = deque(maxlen=_NEWEST)
        self.spent, self.gain = 0, 0.0
        self._known: dict[tuple[int, ...], OrderedBatch] = {}
        self._kept: list[Timetable] = []
        self._newest_batch = self._looked_at = -1
        self._ran_on: tuple[int, ...] = ()
        self._batch_s = 0.0

    # -- observing ----------------------------------------------------------------------------

    def observe(self, profile: PipelineProfile, ran: Order | None, *, is_trial: bool, cost_s: float = 0.0) -> None:
        """Take in a batch.

        Args:
            profile: as measured.
            ran: what it ran; ``None``: 1F1B.
            is_trial: whether it ran 1F1B with split backwards, which is nobody's choice.
            cost_s: seconds that deciding after the profile before took, with this profile's own; of the slowest rank.
        """
        self._known.clear()
        self.gain = 0.0
        moved, self._ran_on = profile.boundaries != self._ran_on, profile.boundaries
        is_enough = self.spent >= _PLANS_MEASURED * pace().any_plan
        if cost_s > 0 and is_enough and not moved:  # else deciding counts with the move
            self._rates.append(self.spent / cost_s)
        self.spent = 0
        batch_s = max((stage.batch_s for stage in profile.stages), default=0.0)
        rate = float(pace().computations_per_s)  # until that is measured: ranks may share a processor
        if self._rates:
            rate = min(rate, median(self._rates))
        earned_s = SHARE_OF_TIME * batch_s * (profile.batch - self._newest_batch) + FIRST_S * (self._newest_batch < 0)
        self.effort = min(2 * most_effort(), self.effort + rate * earned_s)
        self._newest_batch, self._batch_s = profile.batch, batch_s
        if self._start is None:
            self._start = profile.boundaries
            self._worker_bytes = self._bytes_of_1f1b(profile)
        if is_trial:  # what seemed slow gets another chance
            self._excess[True] = deque(list(self._excess[True])[-1:], maxlen=_NEWEST)
        computing_s = max((stage.busy_s + stage.idle_s for stage in profile.stages), default=0.0)
        if not is_trial and computing_s > 0:
            if ran is None:
                predicted_s = simulate(Workload.from_profile(profile)).makespan_s
            else:
                workload = Workload.running(ran, profile)
                predicted_s = self._timetable(ran, workload).makespan_s(workload)
            if predicted_s > 0:
                self._excess[ran is not None].append(computing_s / predicted_s)

    @property
    def correction(self) -> float:
        """What planned orders take longer than predicted, as a multiple of what 1F1B does; 1 until both have run.

        One batch alone counts half, since a machine may have been slow in it; two count two thirds, and so on.
        """
        count = len(self._excess[True])
        if not count or not self._excess[False]:
            return 1.0
        return 1.0 + (median(self._excess[True]) / median(self._excess[False]) - 1.0) * count / (count + 1)

    # -- planning -----------------------------------------------------------------------------

    def has_choice(self, profile: PipelineProfile) -> bool:
        """Whether another order than 1F1B may run.

        Args:
            profile: of any batch.
        """
        return self._config.schedule != "1f1b" and profile.num_micro_batches > 1 and len(profile.boundaries) > 2

    def can_spend(self, profile: PipelineProfile, effort: float = 0.0, *, owes: bool = False) -> bool:
        """Whether what was planned before is paid for, and so many computations more.

        Args:
            profile: of the newest batch.
            effort: computations.
            owes: whether they may be paid for later, since what runs was not planned for such layers.
        """
        return self.effort >= effort - owes * _OWED * _size(profile)

    @staticmethod
    def least_effort(profile: PipelineProfile) -> float:
        """Computations that a search looks at that finds more than one for which there is no time.

        Args:
            profile: of a batch.
        """
        return float(_LEAST_SEARCH * _size(profile))

    def can_look(self) -> bool:
        """Whether there is time for a look at other cuts, which takes what any plan takes, and a share of its own."""
        any_plan_s = pace().any_plan / pace().computations_per_s
        every = any_plan_s / (SHARE_OF_TIME * self._batch_s) if self._batch_s else math.inf
        if self._newest_batch < self._looked_at + every:
            return False
        self._looked_at = self._newest_batch
        return True

    def knows(self, boundaries: Sequence[int]) -> bool:
        """Whether the best order for a partition was found since the newest batch.

        Args:
            boundaries: S + 1 layer indices.
        """
        return tuple(boundaries) in self._known

    def known(self, boundaries: Sequence[int]) -> OrderedBatch:
        """What was found.

        Args:
            boundaries: of a partition that it knows.
        """
        return self._known[tuple(boundaries)]

    def best(
        self, profile: PipelineProfile, boundaries: Sequence[int], varying: Sequence[PipelineProfile] = ()
    ) -> OrderedBatch:
        """The best order for a partition.

        Args:
            profile: with halves.
            boundaries: S + 1 layer indices.
            varying: batches that the profile is the mean of, with halves, if layers vary.
        """
        cuts = tuple(boundaries)
        if cuts not in self._known:
            effort = int(min(most_effort(), max(0.0, self.effort)))
            try:
                planned = plan_on_partition(
                    profile, cuts, self._caps(profile, cuts), speeds=self._speeds.values, effort=effort, varying=varying
                )
                self._spend(planned.num_computations + pace().any_plan)
            except ValueError:  # its layers leave no room under the caps that were given
                planned = None
            self._note(profile, cuts, planned, varying)
        return self._known[cuts]

    def glance(self, profile: PipelineProfile, boundaries: Sequence[int]) -> tuple[float, float]:
        """Seconds of a batch on the present partition, in the present order, and on another one under 1F1B.

        Args:
            profile: with halves; its boundaries are the present partition.
            boundaries: of the other one.
        """
        now = self._now(profile)
        here, there = (self._usual(profile, tuple(cuts)) for cuts in (profile.boundaries, boundaries))
        return here.seconds if now is None else now[0].seconds, there.seconds

    def together(
        self, profile: PipelineProfile, candidates: Sequence[Sequence[int]], pinned: Sequence[int],
        varying: Sequence[PipelineProfile] = (),
    ) -> OrderedBatch:
        """The best partition and order.

        Args:
            profile: with halves.
            candidates: partitions, the present one first.
            pinned: cuts that no partition may have.
            varying: batches that the profile is the mean of, with halves, if layers vary.
        """
        self._candidates = starts = list(dict.fromkeys(map(tuple, candidates)))
        effort = int(min(most_effort(), max(0.0, self.effort)))
        try:
            found = plan_batch(
                profile, starts, worker_bytes=self._caps(profile, *starts), pinned=pinned,
                speeds=self._speeds.values, allow_empty=self._config.allow_empty_stages, effort=effort,
                varying=varying,
            )
        except ValueError:  # no candidate keeps the memory of the workers, under any order
            for cuts in starts:
                self._note(profile, cuts, None, varying)
            return min((self._known[cuts] for cuts in starts), key=lambda one: one.seconds)
        self._spend(found.num_computations + pace().any_plan)
        noted = {starts[0]: found.present, found.placement.boundaries: found.planned}
        for cuts, planned in noted.items():
            self._note(profile, cuts, planned, varying)
        return min((self._known[cuts] for cuts in noted), key=lambda one: one.seconds)

    def again(
        self, profile: PipelineProfile, found: OrderedBatch, varying: Sequence[PipelineProfile] = ()
    ) -> tuple[OrderedBatch, OrderedBatch] | None:
        """A batch as it runs now, and as was found by an earlier profile; nothing is searched.

        Args:
            profile: with halves; its boundaries are the present partition.
            found: an earlier plan of another one, its order written down.
            varying: batches that the profile is the mean of, with halves, if layers vary.

        Returns:
            Both; ``None`` where the order is for other batches, or would hold too much by now.
        """
        order, cuts = found.planned, found.boundaries
        now = self._now(profile, varying)
        present = now[0] if now else self._usual(profile, profile.boundaries, varying)
        if order is None:
            there = self._usual(profile, cuts, varying)
        else:
            assert isinstance(order, Order), "written down when it was kept"
            caps = activation_caps(profile, cuts, self._caps(profile, *self._candidates, cuts))  # as it was found
            workload = Workload.running(order, profile, cuts, speeds=self._speeds.values)
            if order.num_micro_batches != workload.num_micro_batches:
                return None
            timetable = self._timetable(order, workload)
            if any(peak > cap for peak, cap in zip(timetable.peak_bytes(workload), caps, strict=True)):
                return None
            there = self._timed(order, cuts, profile, varying)
        self._known[cuts] = there
        return present, there

    def least_s(
        self, profiles: Sequence[PipelineProfile], partitions: Sequence[Sequence[int]], weight_shares: Sequence[float]
    ) -> list[list[float]]:
        """Seconds that batches take at least in any order that keeps the memory of the workers, if one does.

        Args:
            profiles: of batches; what they hold is taken to be as in the last.
            partitions: S + 1 layer indices each.
            weight_shares: of each layer's backward, what the second half takes.

        Returns:
            Of each partition those of each batch.
        """
        newest, caps = profiles[-1], list[Sequence[int] | None]()
        for cuts in map(tuple, partitions):
            try:
                caps.append(activation_caps(newest, cuts, self._caps(newest, cuts)))
            except ValueError:
                caps.append(None)
        return least_batches_s(profiles, partitions, caps, weight_shares, speeds=self._speeds.values)

    def _usual(
        self, profile: PipelineProfile, cuts: tuple[int, ...], varying: Sequence[PipelineProfile] = ()
    ) -> OrderedBatch:
        workloads = [Workload.from_profile(each, cuts, speeds=self._speeds.values) for each in varying or [profile]]
        seconds = [usual_s(work_of(workload, workload.activation_bytes)) for workload in workloads]
        return OrderedBatch(cuts, None, fmean(seconds), tuple(seconds) if varying else ())

    def _timed(
        self, order: Order, cuts: tuple[int, ...], profile: PipelineProfile, varying: Sequence[PipelineProfile]
    ) -> OrderedBatch:
        workloads = [
            Workload.running(order, each, cuts, speeds=self._speeds.values)
            for each in varying or [profile]
        ]
        correction, timetable = self.correction, self._timetable(order, workloads[0])
        seconds = [timetable.makespan_s(workload) * correction for workload in workloads]
        self._spend(len(varying) * _size(profile) // AS_LONG)
        return OrderedBatch(cuts, order, fmean(seconds), tuple(seconds) if varying else ())

    def _note(
        self, profile: PipelineProfile, cuts: tuple[int, ...], planned: PlannedOrder | None,
        varying: Sequence[PipelineProfile],
    ) -> None:
        """Of a partition, which order is the best: what was planned, what runs now, or 1F1B."""
        usual = best = self._usual(profile, cuts, varying if planned is None or planned.is_1f1b else ())
        if planned is not None and not planned.is_1f1b:
            varying_s = tuple(self.correction * seconds for seconds in planned.varying_s)
            best = self._better(best, OrderedBatch(cuts, planned, planned.seconds * self.correction, varying_s))
        runs = cuts == profile.boundaries
        if runs and self.order_on(cuts) is None and usual.seconds:
            self.gain = 1.0 - best.seconds / usual.seconds
        if runs and planned is not None and (found := self._now(profile, varying)) is not None:
            now, peaks = found
            caps = activation_caps(profile, cuts, self._caps(profile, cuts))
            keeps = all(peak <= cap for peak, cap in zip(peaks, caps, strict=True))
            self.gain = 1.0 - best.seconds / now.seconds if keeps and now.seconds else 1.0
            least = least_saving(now.varying_s, best.varying_s)
            if keeps and (best.planned is None or now.seconds <= best.seconds * (1 + least)):
                best = self._better(usual, now)
        if varying and not best.varying_s:
            best = self._usual(profile, cuts, varying)
        self._known[cuts] = best

    def _now(
        self, profile: PipelineProfile, varying: Sequence[PipelineProfile] = ()
    ) -> tuple[OrderedBatch, tuple[int, ...]] | None:
        """A batch as it runs now, in a planned order, and the most bytes that stages hold.

        ``None``: that order is for other batches, or 1F1B runs.
        """
        order, cuts = self.order_on(profile.boundaries), profile.boundaries
        if order is None or order.num_micro_batches != profile.num_micro_batches:
            return None
        workload = Workload.running(order, profile, speeds=self._speeds.values)
        peaks = self._timetable(order, workload).peak_bytes(workload)
        return self._timed(order, cuts, profile, varying), peaks

    def _timetable(self, order: Order, workload: Workload) -> Timetable:
        """That of an order, kept for the next time; the newest two are: what runs, and what is about to."""
        frozen = workload.frozen_boundaries
        for kept in self._kept:
            if kept.order is order and kept.frozen_boundaries == frozen:
                return kept
        made = Timetable(order, frozen)
        self._kept = [made, *self._kept[:1]]
        return made

    def written(self, batch: OrderedBatch) -> Order | None:
        """The order of a batch, written down if it is not yet.

        Args:
            batch: that is to run.
        """
        planned = batch.planned
        if not isinstance(planned, PlannedOrder):
            return planned
        # An order and its timetable, which also proves that no stage waits for ever, take as long as a listing each.
        self._spend(2 * num_computations(planned.workload.num_stages, planned.workload.num_micro_batches))
        self._timetable(planned.order, planned.workload)
        return planned.order

    def failed(self) -> None:
        """Forget what ranks may know differently, since planning has failed on some of them."""
        self._known.clear()
        self._candidates, self._looked_at = [], self._newest_batch
        self.effort, self.spent, self.gain = 0.0, 0, 0.0

    def _spend(self, effort: int) -> None:
        self.effort -= effort
        self.spent += effort

    def _better(self, usual: OrderedBatch, planned: OrderedBatch | None) -> OrderedBatch:
        if planned is None:
            return usual
        pays = planned.seconds <= usual.seconds * (1.0 - LEAST_GAIN)
        return planned if pays or self._config.schedule == "planned" else usual

    # -- choosing -----------------------------------------------------------------------------

    def order_on(self, boundaries: Sequence[int]) -> Order | None:
        """The present order, if it was chosen for these boundaries; on others it might hold too much.

        Args:
            boundaries: S + 1 layer indices.
        """
        return self.order if tuple(boundaries) == self._chosen_for else None

    def adopt(self, order: Order | None, boundaries: Sequence[int]) -> None:
        """Run an order from now on.

        Args:
            order: ``None``: 1F1B.
            boundaries: what it was chosen for.
        """
        self.order, self._chosen_for = order, tuple(boundaries)

    # -- memory -------------------------------------------------------------------------------

    def _caps(self, profile: PipelineProfile, *partitions: tuple[int, ...]) -> int | list[int]:
        """What workers may hold: as much as the fullest under 1F1B at the start, and no more than their caps.

        Args:
            profile: bytes of every layer.
            partitions: that may be run under 1F1B; as much as the fullest then holds is no more.
        """
        most = max(self._worker_bytes, self._bytes_of_1f1b(profile))
        for cuts in partitions:
            most = max(most, worker_bytes_of_1f1b(profile, cuts, activation_budget=self._config.activation_budget))
        given = self._config.memory_cap_bytes
        if isinstance(given, list):
            return [min(most, cap) for cap in given]
        return most if given is None else min(most, given)

    def _bytes_of_1f1b(self, profile: PipelineProfile) -> int:
        start = self._start
        if start is None or len(start) != len(profile.boundaries):
            return 0
        return worker_bytes_of_1f1b(profile, start, activation_budget=self._config.activation_budget)

    # -- state --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All of it, plain values."""
        return {
            "order": None if self.order is None else str(self.order), "effort": self.effort,
            "chosen_for": self._chosen_for,
            "excess": {kind: list(values) for kind, values in self._excess.items()}, "start": self._start,
            "worker_bytes": self._worker_bytes, "candidates": self._candidates, "newest_batch": self._newest_batch,
            "rates": list(self._rates), "ran_on": self._ran_on, "spent": self.spent, "looked_at": self._looked_at,
            "batch_s": self._batch_s,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take in what :meth:`state_dict` gave.

        Args:
            state: as given; empty from an older checkpoint, or from other stages.
        """
        text = state.get("order")
        self.order = None if text is None else Order.parse(text)
        self._chosen_for = tuple(state.get("chosen_for", ()))
        self.effort = state.get("effort", 0.0)
        for kind, values in state.get("excess", {}).items():
            self._excess[kind] = deque(values, maxlen=_NEWEST)
        self._start = None if state.get("start") is None else tuple(state["start"])
        self._worker_bytes = state.get("worker_bytes", 0)
        self._candidates = [tuple(cuts) for cuts in state.get("candidates", ())]
        self._newest_batch = state.get("newest_batch", -1)
        self._ran_on = tuple(state.get("ran_on", ()))
        self._looked_at, self._batch_s = state.get("looked_at", -1), state.get("batch_s", 0.0)
        self._rates, self.spent = deque(state.get("rates", ()), maxlen=_NEWEST), state.get("spent", 0)
        self._known.clear()


def least_saving(present_s: Sequence[float], new_s: Sequence[float]) -> float:
    """Share of a batch that a new order must save, else the present one goes on.

    Where batches vary, both were timed on the same few of them, and the new one was made for these: it must save more
    than chance would let it.

    Args:
        present_s: seconds of these batches in the present order; empty where batches do not vary.
        new_s: the same in the new one.
    """
    shares = [1.0 - new / present for present, new in zip(present_s, new_s, strict=False) if present]
    if len(shares) < 2:
        return AS_GOOD
    return max(AS_GOOD, CHANCE * stdev(shares) / math.sqrt(len(shares)))


def most_effort() -> float:
    """Computations that one plan may look at."""
    return max(float(EFFORT), MOST_S * pace().computations_per_s)


def _size(profile: PipelineProfile) -> int:
    """Computations of a batch."""
    return num_computations(len(profile.boundaries) - 1, profile.num_micro_batches)
