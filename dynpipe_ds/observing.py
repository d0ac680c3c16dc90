"""From a profiled batch to what decisions rest on."""

from __future__ import annotations

from typing import Any

from dynpipe_ds.host.pipeline import Pipeline
from dynpipe_ds.measure.gather import BalancingSeconds
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.messages.obstacles import obstructed_cuts
from dynpipe_ds.reporting.monitor import write_profile
from dynpipe_ds.run import Run
from dynpipe_ds.telling import log

_MANY = 10
"""So many profiles in a row that were left out are worth a warning."""


class Observing:
    """Takes in profiles.

    Args:
        run: whose batches are profiled.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._num_left_out = 0

    def finish(self, newest: PipelineProfile | None, monitor: Any) -> bool:
        """Agree on the profile of the batch that was run, and let decisions count it; collective over all ranks.

        Args:
            newest: the profile before it; ``None`` if there is none.
            monitor: DeepSpeed's.

        Returns:
            Whether it counts: not if some rank measured nonsense, or has compiled something.
        """
        run, balancer = self._run, self._run.balancer
        try:
            measured = run.profiler.finish(run.num_batches - 1, newest)
        except ValueError as error:  # the same on every rank: all read the same numbers
            run.warn_once(f"a batch's profile is left out, since its numbers can't be true ({error})", "profile")
            return False
        seconds = measured.seconds
        with run.clock.work("observe") as noting:
            balancer.forbid(obstructed_cuts(measured.obstacles, self._run.stage.partition[-1]))
            cost_s = seconds.move_s + seconds.compile_s  # what moved is compiled where it has arrived
            if seconds.move_s > 0:  # a clock that jumped back is no cost
                balancer.record_cost(cost_s)
            if seconds.compile_s > 0:
                self._leave_out(seconds)
                return False
            self._num_left_out = 0
            believed = balancer.unequal_workers
            balancer.observe(measured.profile, seconds.own_s + seconds.gather_s)
            self._tell_speeds(believed)
            has_order = balancer.ordering.order is not None
            write_profile(monitor, measured.profile, self._pipeline.num_samples, has_planned_order=has_order)
            self._note(measured.profile, has_planned_order=has_order)
        run.profiler.count_noting(noting.seconds)
        return True

    @property
    def _pipeline(self) -> Pipeline:
        return self._run.stage.pipeline

    def _leave_out(self, seconds: BalancingSeconds) -> None:
        """A batch in which layers were compiled says nothing of what they take; the next one is profiled."""
        self._num_left_out += 1
        self._run.journal.compiled(self._run.num_batches - 1, seconds.compile_s)
        self._run.profiler.sizes_changed()  # those of this batch are left out, too
        if self._pipeline.rank == 0:
            log.info(
                "dynamic_pipeline: batch %d compiled layers for %.1f s (of all ranks, the slowest), so its profile is "
                "left out", self._run.num_batches, seconds.compile_s,
            )  # fmt: skip
        if self._num_left_out == _MANY:
            self._run.warn_once(
                f"{_MANY} profiles in a row were left out, since torch compiled something in each of these batches, so "
                "layers don't move; give inputs few different shapes (padding)", "compile",
            )  # fmt: skip

    def _note(self, measured: PipelineProfile, *, has_planned_order: bool) -> None:
        """Tell the journal what was measured, and what decisions rest on."""
        balancer = self._run.balancer
        smoothed = balancer.smoothed()
        assert smoothed is not None, "a batch was just observed"
        self._run.journal.profile(
            measured, smoothed, order="planned" if has_planned_order else "1F1B", speeds=balancer.speeds,
            pinned=balancer.pinned,
        )

    def _tell_speeds(self, believed: list[str]) -> None:
        """Log once which workers are slow, when that is believed otherwise than before."""
        told = self._run.balancer.unequal_workers
        if told != believed and self._pipeline.rank == 0:
            log.info(
                "dynamic_pipeline: workers after batch %d: %s", self._run.num_batches, ", ".join(told) or "all alike"
            )
