"""What the engine does after a batch: agree on its profile, ask the controller, choose, move.

Whatever every rank fails in together leaves the partition as it is and training going on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.controller import Controller
from dynpipe_ds.decide.methods import PartitionMethod
from dynpipe_ds.events import Overhead, RebalanceEvent
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.measure.recorder import BatchRecorder, LayerSizes, Spent, gather_profile, layer_sizes
from dynpipe_ds.messages.obstacles import agree_on_obstacles, obstructed_cuts
from dynpipe_ds.migration.transaction import MigrationError
from dynpipe_ds.partition import Plan, StageMemory
from dynpipe_ds.ranks.agreement import disagreement
from dynpipe_ds.reporting.monitor import GuardedMonitor, write_profile, write_rebalance
from dynpipe_ds.telling import warn


class BalancingEngine(PipelineEngine):  # type: ignore[misc]
    """A pipeline engine that decides where its stages end; base of the dynamic engine."""

    dynamic_config: DynamicPipelineConfig
    stage_optimizer: StageOptimizer | None
    _method: PartitionMethod
    _pinned: tuple[int, ...]

    @property
    def partition(self) -> tuple[int, ...]:
        """The present boundaries, ``S + 1`` ints: stage s holds layers ``[p[s], p[s + 1])``."""
        return tuple(int(b) for b in self.module.parts)

    def _start_balancing(self) -> None:
        self.overhead = Overhead()
        self.monitor: Any = GuardedMonitor(self.monitor)
        self._recorder = BatchRecorder()
        self._controller = Controller(self.dynamic_config)
        self._obstacles: dict[int, str] = {}
        self._activation_bytes: dict[int, int] = {}
        self._sizes: dict[int, LayerSizes] = {}
        self._measure_sizes = True
        self._spent = Spent()
        self._bytes_moved = 0
        self._callbacks: list[Callable[[RebalanceEvent], Any]] = []
        self._num_batches = 0
        self._warned: set[str] = set()

    def _take_profile(self, activation_bytes: dict[int, int] | None) -> bool:
        """Agree on the profile of the batch; false if some rank measured nonsense."""
        started = time.perf_counter()
        if activation_bytes is not None:
            self._activation_bytes = activation_bytes
            self._sizes = self._layer_sizes()
        elif newest := self._controller.newest:
            self._activation_bytes = {i: layer.activation_bytes for i, layer in enumerate(newest[-1].layers)}
        times = self._recorder.stop()
        gathering = time.perf_counter()
        own_s = self._recorder.recording_s + gathering - started
        try:
            profile, spent, obstructing = gather_profile(
                times, self._sizes, self._activation_bytes, batch=self._num_batches - 1, boundaries=self.partition,
                names=self.module.layer_names(), stage=self.stage_id, device=self.device,
                spent=self._spent._replace(own_s=self._spent.own_s + own_s), obstacles=self._recorder.obstacles,
            )
        except ValueError as error:  # the same on every rank: all read the same numbers
            self._warn_once(f"a batch's profile is left out, since its numbers can't be true ({error})", "profile")
            return False
        self._forbid_cuts_behind(obstructing)
        noting = time.perf_counter()
        if spent.move_s > 0:  # a clock that jumped back is no cost
            self._controller.record_cost(spent.move_s, self._bytes_moved)
        self._controller.observe(profile, spent.own_s + spent.gather_s)
        write_profile(self.monitor, profile, self.global_samples)
        noting_s = time.perf_counter() - noting
        self._spent = Spent(gather_s=noting - gathering, own_s=noting_s)
        self.overhead.profiling_s += own_s + spent.gather_s + noting_s
        return True

    def _forbid_cuts_behind(self, layers: set[int]) -> None:
        """Let no partition cut where what crosses can't be sent; collective where a layer is new."""
        self._obstacles = agree_on_obstacles(layers, self._recorder.obstacles, self._obstacles)
        self._pinned = tuple(sorted({*self._pinned, *obstructed_cuts(self._obstacles, self.partition[-1])}))

    def _layer_sizes(self) -> dict[int, LayerSizes]:
        state_bytes = self.stage_optimizer.state_bytes if self.stage_optimizer else lambda _: 0
        gradient_dtype = self.get_data_types()[1]
        return {i: layer_sizes(layer, state_bytes, gradient_dtype) for i, layer in self.local_layers().items()}

    def _maybe_rebalance(self) -> None:
        """Ask the controller and move; what fails on every rank together leaves training going on as before."""
        started = time.perf_counter()
        if not self._controller.due(self._num_batches - 1):
            self._count_deciding(time.perf_counter() - started)
            return
        profile = self._planning_profile()
        plan, failure = self._plan(profile)
        decision = None if plan is None else self._controller.worth_it(plan, profile)
        plan_s = time.perf_counter() - started
        if plan is not None and decision is not None and decision.rebalance:
            try:
                self._move_to(plan, plan_s)
            except MigrationError as error:
                failure = error
        else:
            self._count_deciding(plan_s)
        if failure is not None:
            self._controller.record_failure(self._num_batches - 1)
            self._warn_once(
                f"re-partitioning after batch {self._num_batches} failed, training goes on with "
                f"{list(self.partition)} ({failure})", "rebalance",
            )

    def _count_deciding(self, seconds: float) -> None:
        """Note what it took to decide to stay: the more, the fewer batches are profiled."""
        self.overhead.planning_s += seconds
        self._spent = self._spent._replace(own_s=self._spent.own_s + seconds)

    def _warn_once(self, message: str, what: str) -> None:
        """Warn on the first rank, once for each kind of trouble."""
        if what not in self._warned and self.global_rank == 0:
            warn(f"{message}; further ones will not be reported")
        self._warned.add(what)

    def _plan(self, profile: PipelineProfile) -> tuple[Plan | None, Exception | None]:
        """The method's choice for a profile, the same on every rank; or what every rank may raise instead."""
        error: Exception | None = None
        plan: Plan | None = None
        try:
            plan = self._choose(profile)
        except Exception as caught:  # noqa: BLE001 - a user's partitioner may raise anything
            error = caught
        boundaries = () if plan is None else plan.boundaries
        problem = disagreement(boundaries, f"the boundaries chosen by {self._method}", self.device, error)
        return (plan, None) if problem is None else (None, error or ValueError(problem))

    def _choose(self, profile: PipelineProfile) -> Plan:
        config = self.dynamic_config
        memory = None
        if config.memory_cap_bytes is not None:
            memory = StageMemory(
                state_bytes=profile.state_bytes(), activation_bytes=profile.activation_bytes(),
                num_micro_batches=self.micro_batches, cap_bytes=config.memory_cap_bytes,
            )
        return self._method.plan(
            profile, self.num_stages, current=self.partition, pinned=self._pinned, memory=memory,
            speeds=config.stage_speeds, allow_empty=config.allow_empty_stages,
        )

    def _planning_profile(self) -> PipelineProfile:
        """The smoothed profile with layer times as on a worker of speed 1."""
        profile = self._controller.smoothed()
        assert profile is not None, "asked for after a batch was profiled"
        return profile

    def _move_to(self, plan: Plan, plan_s: float) -> RebalanceEvent | None:
        self.overhead.planning_s += plan_s
        before, started = self.partition, time.perf_counter()
        if plan.boundaries == before:
            return None
        self._migrate(plan.boundaries)
        event = RebalanceEvent(
            batch=self._num_batches, before=before, after=self.partition, predicted_gain=plan.predicted_gain,
            bytes_moved=plan.bytes_to_move, plan_s=plan_s, migrate_s=time.perf_counter() - started,
        )
        self.overhead.migrating_s += event.migrate_s
        self._spent, self._bytes_moved = self._spent._replace(move_s=event.seconds), event.bytes_moved
        self._controller.record_rebalance(self._num_batches - 1)
        write_rebalance(self.monitor, event, self.global_samples)
        for callback in self._callbacks:
            try:
                callback(event)
            except Exception as error:  # noqa: BLE001 - the layers have moved: the other ranks go on
                warn(f"the on_rebalance callback {callback!r} raised {type(error).__name__}: {error}; training goes on")
        return event
