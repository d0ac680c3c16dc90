"""What the engine does to train on fewer ranks: decide, shrink, renew what is counted by stage."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from dynpipe_ds.agreement import same_everywhere
from dynpipe_ds.balancing import BalancingEngine
from dynpipe_ds.controller import Controller
from dynpipe_ds.data_position import ReadingEngine
from dynpipe_ds.events import RepackEvent
from dynpipe_ds.partition import check_boundaries
from dynpipe_ds.repacking.live import RepackError, Shrink

_engines: weakref.WeakSet[Any] = weakref.WeakSet()


class RepackingEngine(BalancingEngine, ReadingEngine):
    """A pipeline engine whose number of stages can shrink; base of the dynamic engine."""

    def _start_repacking(self) -> None:
        self._repack_callbacks: list[Callable[[RepackEvent], Any]] = []
        _engines.add(self)

    def on_repack(self, callback: Callable[[RepackEvent], Any]) -> Callable[[RepackEvent], Any]:
        """Call a function on every rank after re-packing, also on those that leave; usable as a decorator.

        Args:
            callback: gets a :class:`RepackEvent`. On a rank that leaves, its ``released`` is true, no
                collective works any more, and the process ends with exit code 0 when the callbacks return.

        Returns:
            The callback.
        """
        self._need_dynamic("on_repack")
        self._repack_callbacks.append(callback)
        return callback

    def _shrink(
        self, staying: Sequence[int], boundaries: Sequence[int], *, reason: str, plan_s: float,
        checks: Callable[[], None] = lambda: None,
    ) -> RepackEvent:
        """Go on with some of the stages; does not return on the ranks of the others.

        Args:
            staying: the stages that stay.
            boundaries: partition of the shorter pipeline.
            reason: for the event.
            plan_s: seconds that deciding took.
            checks: more to try before the point of no return.

        Raises:
            RepackError: on every rank, if it failed; training can go on with all ranks.
            RankLostError: if a rank ended meanwhile.
        """
        began = time.perf_counter()
        self._refuse_other_engines()
        before, shrink = self.partition, Shrink(self, staying, boundaries)
        with self._naming_lost_ranks("layers were moved to fewer ranks"):
            shrink.prepare(checks)
            migrate_s = time.perf_counter() - began

            def event(regroup_s: float) -> RepackEvent:
                return RepackEvent(
                    batch=self._num_batches, before=before, after=tuple(boundaries),
                    released_ranks=tuple(sorted(shrink.world.leaving)), released=not shrink.stays, reason=reason,
                    plan_s=plan_s, migrate_s=migrate_s, regroup_s=regroup_s,
                )

            if not shrink.stays:
                shrink.leave(lambda: self._tell(event(0.0)))
            regrouping = time.perf_counter()
            shrink.go_on()
        self._forget_old_stages(staying)
        happened = event(time.perf_counter() - regrouping)
        self.overhead.repacking_s += happened.seconds
        self._tell(happened)
        return happened

    def _refuse_other_engines(self) -> None:
        others = [engine for engine in _engines if engine is not self]
        if others:
            raise RepackError(
                f"{len(others)} other engine(s) of this process use the same process groups, which re-packing "
                "replaces; delete them (del engine, gc.collect()) before"
            )

    def _forget_old_stages(self, staying: Sequence[int]) -> None:
        """What was measured on stages, or is given for each stage, belongs to the longer pipeline."""
        config = self.dynamic_config
        per_stage = {
            key: [getattr(config, key)[stage] for stage in staying]
            for key in ("memory_cap_bytes", "stage_speeds") if isinstance(getattr(config, key), list)
        }
        self.dynamic_config = config.model_copy(update=per_stage)
        known = self._controller.state_dict()
        self._controller = Controller(self.dynamic_config)
        self._controller.load_state_dict(known, same_stages=False)
        self._window = []
        self._settle()

    def _tell(self, event: RepackEvent) -> None:
        for callback in self._repack_callbacks:
            try:
                callback(event)
            except Exception as error:  # noqa: BLE001 - the ranks have left: there is no way back
                message = f"the on_repack callback {callback!r} raised {type(error).__name__}: {error}"
                warnings.warn(f"dynamic_pipeline: {message}; training goes on", stacklevel=2)
