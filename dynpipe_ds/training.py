"""The loop that a dynamic engine runs: a batch, its profile, a decision, a move.

:meth:`Training.train_batch` is the whole of it, top to bottom. What it calls are the parts that a dynamic engine has:
the stage (``stage.py``), the profiler (``measure/``), the balancer (``decide/``), checkpoints and the re-packer.
Whatever every rank fails in together leaves the partition as it is and training going on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch.distributed as dist

from dynpipe_ds.checkpoint.checkpoints import Checkpoints
from dynpipe_ds.config import DynamicPipelineConfig, Hold, checked_hold
from dynpipe_ds.decide import Balancer, Decision
from dynpipe_ds.events import Overhead, RebalanceEvent
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.host.order import ordered
from dynpipe_ds.host.passing import BatchRefused
from dynpipe_ds.host.pipeline import Pipeline
from dynpipe_ds.joining.doorway import papers
from dynpipe_ds.joining.entering import Entering
from dynpipe_ds.joining.newcomer import Newcomer
from dynpipe_ds.journal.write import JournalWriter
from dynpipe_ds.measure.clock import current_clock
from dynpipe_ds.measure.profile import PipelineProfile, smooth
from dynpipe_ds.measure.profiler import Profiler
from dynpipe_ds.messages.obstacles import check_cuts
from dynpipe_ds.messages.traffic import digest
from dynpipe_ds.migration.freeze import Change
from dynpipe_ds.migration.replace import ParameterReplacement
from dynpipe_ds.migration.transaction import MigrationError
from dynpipe_ds.observing import Observing
from dynpipe_ds.partition import Placement, Plan, check_boundaries
from dynpipe_ds.planning import agree_on_pace, compile_planning, is_worth_compiling
from dynpipe_ds.ranks.agreement import disagreement, gather, same_everywhere, together
from dynpipe_ds.repacking.repacker import Repacker
from dynpipe_ds.reporting.monitor import write_rebalance
from dynpipe_ds.schedule import Order
from dynpipe_ds.snapshots.taking import Snapshots
from dynpipe_ds.stage import Stage
from dynpipe_ds.survive.landmarks import Landmarks
from dynpipe_ds.survive.repeating import Repeating
from dynpipe_ds.survive.survivor import Survivor
from dynpipe_ds.telling import log, tell_all, warn

T = TypeVar("T")


class Training:
    """Trains batches and moves layers between them; all methods are collective over all ranks.

    Args:
        stage: what is here of the model.
        balancer: decides.
        checkpoints: saves and loads.
        config: the ``dynamic_pipeline`` section.

    Attributes:
        stage: as given.
        balancer: as given.
        checkpoints: as given.
        config: the section; with fewer stages after re-packing.
        clock: which all seconds are read from.
        profiler: measures batches.
        observing: takes in their profiles.
        repacker: goes on with fewer stages.
        snapshots: copies state into other workers' memory.
        landmarks: checkpoints that training can go back to in place.
        survivor: goes on without ranks that are lost.
        repeating: repeats what was done when a rank was lost.
        overhead: seconds that this rank has spent on not training.
        profiling: whether batches are profiled.
        num_batches: trained so far.
        callbacks: called after every change of partition.
        joined_with: the user's own values that this process found when it joined; ``None`` if it did not join.
        journal: of the run, on the first rank.
    """

    def __init__(
        self, stage: Stage, balancer: Balancer, checkpoints: Checkpoints, config: DynamicPipelineConfig
    ) -> None:
        self.stage = stage
        self.balancer = balancer
        self.config = config
        self.checkpoints = checkpoints
        self.clock = current_clock()
        self.overhead = Overhead()
        self.profiler = Profiler(stage, self.overhead, self.clock)
        self.observing = Observing(self)
        self.repacker: Repacker = Repacker(self)
        self.survivor = Survivor(self)
        self.repeating = Repeating(self, self.survivor)
        self.snapshots = Snapshots(self, self.repeating.state)
        self.landmarks = Landmarks(self)
        self.profiling = True
        self.num_batches = 0
        self.callbacks: list[Callable[[RebalanceEvent], Any]] = []
        self.joined_with: dict[str, Any] | None = None
        self.journal = JournalWriter(config.journal, self._about)
        self._monitor: Any = None
        self._in_batch = self._is_started = False
        self._warned: set[str] = set()

    def start(self, monitor: Any) -> None:
        """Begin, after DeepSpeed's constructor.

        Args:
            monitor: DeepSpeed's.
        """
        self._monitor = monitor
        self.stage.start()
        self.repacker.start()
        self.stage.guard.start()
        self._is_started = True
        self.stage.adopt_optimizer()
        self.snapshots.start(self.repacker.giving_back.backend.node_name())
        self.survivor.start()

    def open_doors(self) -> None:
        """Plan as fast as all can, and let workers knock, when the engine is complete; collective over all ranks."""
        is_worth_it = self._is_worth_compiling()
        is_compiled = all(gather(is_worth_it and compile_planning()))
        agree_on_pace(is_compiled=is_compiled)
        if is_worth_it and not is_compiled and dist.get_rank() == 0:
            log.info(
                "dynamic_pipeline: orders are planned in Python; where every rank has Numba (pip install "
                "'dynpipe_ds[fast]'), the same plans take a ninth of the time"
            )
        self.repacker.open_doors()

    def enter(self, newcomer: Newcomer) -> None:
        """Become a stage of the job that this process is to join; returns when it is one, and holds its layers.

        Args:
            newcomer: how it speaks to the job.
        """
        if self._is_worth_compiling():
            compile_planning()
        agree_on_pace(is_compiled=newcomer.job["plans_compiled"])
        what_now, client = Entering(self, newcomer).wait(papers(self))
        self.joined_with = client
        self.repacker.has_joined(**what_now)

    def _is_worth_compiling(self) -> bool:
        plans = self.config.enabled and self.config.schedule != "1f1b"
        return plans and is_worth_compiling(self.stage.module.num_stages, self.pipeline.num_micro_batches)

    # -- what DeepSpeed's engine asks ---------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """DeepSpeed's engine."""
        return self.stage.pipeline

    @property
    def stage_optimizer(self) -> StageOptimizer | None:
        """What moves the optimizer's state."""
        return self.stage.optimizer

    def naming_lost_ranks(self, doing: str) -> AbstractContextManager[None]:
        """Name whoever is lost inside.

        Args:
            doing: what goes on inside.
        """
        return self.stage.guard.naming_lost_ranks(doing)

    def optimizer_was_made(self) -> None:
        """Take note of an optimizer: made by DeepSpeed's constructor, or later."""
        if self._is_started:
            self.stage.adopt_optimizer()
            self.profiler.sizes_changed()

    def before_step(self) -> None:
        """Get ready for the optimizer's step, in which parameters change."""
        self.snapshots.before_change()

    def end(self) -> None:
        """Let go of the process groups."""
        self.journal.close()
        self.repacker.end()
        self.snapshots.end()
        self.survivor.end()

    # -- the loop -----------------------------------------------------------------------------

    def train_batch(self, run: Callable[[], T]) -> T:
        """Run a batch, and what belongs around it unless that is being done already.

        Args:
            run: runs it, by DeepSpeed's or a client's own ``train_batch``.
        """
        if self._in_batch:
            return run()
        self._in_batch = True
        try:
            return self.repeating.batch(lambda: self._train_batch(run))
        finally:
            self._in_batch = False

    def watch_anew(self, *, fewer: bool = False) -> None:
        """Take note that the ranks are others, on purpose; collective over all ranks.

        Args:
            fewer: whether some have left.
        """
        self.snapshots.reconnect()
        self.survivor.follow(fewer=fewer)

    @property
    def survives(self) -> bool:
        """Whether ranks go on without those that are lost."""
        return self.survivor.is_on

    def surviving(self, action: Callable[[], T]) -> T:
        """Do something between batches, and again if ranks are lost meanwhile and the others go on.

        Args:
            action: collective over all ranks; has done nothing that matters if it raises.
        """
        return self.repeating.between_batches(action)

    def _train_batch(self, run: Callable[[], T]) -> T:
        self.repacker.let_in(self.survivor.wanted_stages)
        self.notice_frozen_layers()
        self.snapshots.begin_batch()
        self.repeating.begin_batch()
        self.repeating.act_before()
        self.stage.pipeline.begin_batch()
        is_profiled, began_s = self.profiling and self._wants_profile(), self.clock.now_s()
        self.stage.pipeline.run_order(self.balancer.ordering.next(is_profiled=is_profiled))
        started = self.clock.now_s()
        with self.repeating.keeping_data():
            result = self._run(run, is_profiled=is_profiled)
        self.num_batches += 1
        self.snapshots.end_batch(self.clock.now_s() - started)
        self.repeating.act_after()
        if is_profiled:
            with self.stage.guard.no_way_back(f"stages were balanced after batch {self.num_batches}"):
                if self.observing.finish(self.last_profile, self._monitor):
                    self._balance()
                    self.repacker.repack_if_wanted()
        self.journal.batch(self.num_batches - 1, result, self.clock.now_s() - began_s)
        self.repacker.leave_if_told()
        return result

    def _wants_profile(self) -> bool:
        """Whether the next batch is profiled, the same on every rank."""
        return self.balancer.wants_profile(self.num_batches) or self.repacker.wants_profile(self.num_batches)

    def _run(self, run: Callable[[], T], *, is_profiled: bool) -> T:
        try:
            result = self.profiler.run(run, self.num_batches, self.last_profile, is_profiled=is_profiled)
        except BatchRefused:
            self.stage.pipeline.drop_batch()
            self.stage.pipeline.reading.kept.forget(self.num_batches)
            raise
        return result

    def _about(self) -> dict[str, Any]:
        """What the journal tells of the job first."""
        return {
            "layers": list(self.stage.module.layer_names()), "samples_a_batch": self.pipeline.samples_a_batch,
            "num_ranks": dist.get_world_size(), "device": self.stage.device.type,
            "settings": self.config.model_dump(mode="json", exclude_defaults=True),
        }  # fmt: skip

    def _balance(self) -> None:
        """Decide, agree, move; what fails on every rank together leaves training going on as before."""
        batch, ordering = self.num_batches - 1, self.balancer.ordering
        decided: tuple[Plan, Decision] | None = None
        order: Order | None = None
        failure: Exception | None = None
        with self.clock.work("decide") as deciding:
            is_due = ordering.is_due()
            try:
                decided = self.balancer.decide(batch, self.stage.partition)
                moves = decided is not None and decided[1].rebalance
                boundaries = decided[0].boundaries if decided is not None and moves else self.stage.partition
                order = ordering.choose(self.balancer.smoothed(), boundaries)
            except Exception as error:  # noqa: BLE001 - a user's partitioner may raise anything
                failure = error
            deciding.num_computations = ordering.num_looked_at
            # On one rank as on all: what is due follows from profiles.
            if is_due or decided is not None or failure is not None:
                failure = self._disagreement(decided and decided[0], order, failure)
        plan_s = deciding.seconds
        if decided is not None and failure is None and decided[1].rebalance:
            try:
                self._move(decided[0], plan_s)
            except MigrationError as error:
                failure = error
        else:
            self.overhead.planning_s += plan_s
            self.profiler.count_deciding(plan_s)
        if failure is None:
            ordering.adopt(order, self.stage.partition)
        else:
            self.balancer.failed(batch)
            self.warn_once(
                f"re-partitioning after batch {self.num_batches} failed, training goes on with "
                f"{list(self.stage.partition)} and the order it has ({failure})", "rebalance",
            )

    def _disagreement(
        self, plan: Plan | None, order: Order | None, failure: Exception | None
    ) -> Exception | None:
        """What every rank may raise if they have not all made the same plan; collective."""
        boundaries = () if plan is None else plan.boundaries
        what = f"the boundaries chosen by {self.balancer.method} (before them a digest of the order, 0 for 1F1B)"
        digested = 0 if order is None else digest(order)
        problem = disagreement((digested, *boundaries), what, self.stage.device, failure)
        return None if problem is None else failure or ValueError(problem)

    def _move(self, plan: Plan, plan_s: float) -> RebalanceEvent | None:
        self.overhead.planning_s += plan_s
        before = self.stage.partition
        if plan.boundaries == before:
            return None
        with self.clock.work("move") as moving:
            moving.num_bytes = self.move_layers(plan.placement)
        event = RebalanceEvent(
            batch=self.num_batches, before=before, after=self.stage.partition, predicted_gain=plan.predicted_gain,
            bytes_moved=plan.bytes_to_move, plan_s=plan_s, migrate_s=moving.seconds,
        )
        self.balancer.ordering.adopt(None, self.stage.partition)  # one for another partition may hold too much here
        self.overhead.migrating_s += event.migrate_s
        self.profiler.count_move(event.seconds)
        self.balancer.moved(self.num_batches - 1, plan.bytes_to_move)
        write_rebalance(self._monitor, event, self.stage.pipeline.num_samples)
        self.journal.moved(event)
        tell_all(self.callbacks, event, "on_rebalance")
        return event

    @property
    def order(self) -> Order:
        """What every stage runs in an ordinary batch."""
        return ordered(self.balancer.ordering.order, self.pipeline.num_micro_batches, self.stage.num_stages)

    @property
    def repacking(self) -> Repacker:
        """What re-packing is about to do; a checkpoint keeps it."""
        return self.repacker

    # -- between batches ----------------------------------------------------------------------

    @property
    def last_profile(self) -> PipelineProfile | None:
        """The profile of the newest profiled batch; ``None`` before the first one."""
        newest = self.balancer.newest
        return newest[-1] if newest else None

    @property
    def profile(self) -> PipelineProfile | None:
        """The newest profiles smoothed, with halves of backwards where known; ``None`` before the first batch."""
        if self.balancer.speeds is None:
            return self.balancer.smoothed()
        newest = self.balancer.newest  # times as measured, not of a worker of speed 1
        return smooth(newest, self.config.smoothing) if newest else None

    def move_layers(self, placement: Placement) -> int:
        """Let layers move, without asking whether that pays.

        Args:
            placement: checked.

        Returns:
            Bytes that this rank sent or received, whichever is more.

        Raises:
            MigrationError: on every rank, if moving failed; the old partition is then in force.
        """
        num_bytes = self.stage.move(placement)
        if num_bytes is None:
            self.notice_frozen_layers()
            num_bytes = self.stage.move(placement)
            assert num_bytes is not None
        self.profiler.sizes_changed()
        return num_bytes

    def notice_frozen_layers(self) -> None:
        """Rebuild the optimizer where the user froze or unfroze layers since the last batch.

        Raises:
            ValueError: on every rank, if the replicas of a stage differ in what they froze.
            MigrationError: on every rank, if any rank could not do its part; its optimizer is then as before.
        """
        with self.clock.work("freeze") as freezing:
            change = self.stage.notice_frozen_layers()
            freezing.was_needed = change is not Change.NONE
        if freezing.was_needed:
            self.profiler.sizes_changed()
            self._changed_by_script()
            self.balancer.expect_change()
            if change is not Change.FROZEN:  # else the order that runs may hold too much, until another is planned
                self.balancer.ordering.adopt(None, self.stage.partition)
            self.overhead.migrating_s += freezing.seconds

    def layers_were_compiled(self) -> None:
        """Let layers be measured anew; a worker that joins does by itself what the others did before."""
        if self.num_batches and self.joined_with is None:
            self.balancer.expect_change()

    def _changed_by_script(self) -> None:
        """What acts between batches is called by us and does it again; what a script does by itself it does not."""
        if not self.repeating.between:
            self.snapshots.changed()

    def replace_parameters(self, replacements: Sequence[ParameterReplacement]) -> None:
        """Give local layers parameters of another shape.

        Args:
            replacements: those of this rank's layers.
        """
        self.notice_frozen_layers()
        with self.clock.work("replace") as replacing:
            self.stage.replace(replacements)
        self.profiler.sizes_changed()
        self._changed_by_script()
        self.balancer.expect_change()
        self.overhead.migrating_s += replacing.seconds

    def set_num_micro_batches(self, num_micro_batches: int) -> None:
        """Run the next batches in another number of micro-batches, with the same samples.

        Args:
            num_micro_batches: M, the same on every rank.

        Raises:
            ValueError: on every rank, if it can't be.
        """
        stage = self.stage
        with stage.guard.naming_lost_ranks("the number of micro-batches was changed"):
            same_everywhere([num_micro_batches], "the number of micro-batches", stage.device)
            together(lambda: stage.pipeline.check_micro_batches(num_micro_batches), stage.device, ValueError)
        if num_micro_batches != stage.pipeline.num_micro_batches:
            self.repacker.scaling.leaves(stage.pipeline.micro_batch_size, self.repacker.micro_batch_s())
            stage.pipeline.set_micro_batches(num_micro_batches)
            self.snapshots.changed()  # which do not hold it
            self.balancer.serve(self.config)
            self.balancer.expect_change()  # every layer takes another time
            self.profiler.sizes_changed()

    def rebalance(self) -> RebalanceEvent | None:
        """Choose boundaries from the present profile and move to them, whatever the gain."""
        if not self.balancer.newest:
            raise RuntimeError(
                "there is no profile to rebalance from; train one batch first (one in which torch compiles layers does "
                "not count)"
            )
        with self.stage.guard.naming_lost_ranks("a partition was chosen"):
            plan: Plan | None = None
            failure: Exception | None = None
            with self.clock.work("decide") as deciding:
                try:
                    plan = self.balancer.choose(self.stage.partition)
                except Exception as error:  # noqa: BLE001 - a user's partitioner may raise anything
                    failure = error
                failure = self._disagreement(plan, None, failure)
            if plan is None or failure is not None:
                raise failure or AssertionError
            event = self._move(plan, deciding.seconds)
            self.balancer.release()
            return event

    def repartition(self, boundaries: Sequence[int], hold: Hold | None) -> RebalanceEvent | None:
        """Move to given boundaries, which then hold.

        Args:
            boundaries: ``S + 1`` ints, the same on every rank.
            hold: for how many batches.
        """
        stage = self.stage
        with stage.guard.naming_lost_ranks("boundaries were compared"):
            num_batches = self._agreed_hold(boundaries, hold)
        names = stage.module.layer_names()
        check_cuts(boundaries, self.profiler.obstacles, names)
        checked = check_boundaries(
            boundaries, num_layers=len(names), num_stages=stage.num_stages,
            pinned=self.balancer.pinned, allow_empty=self.config.allow_empty_stages,
        )
        event = self._move(self.balancer.plan_of(checked, stage.partition, self.profile), 0.0)
        self.balancer.hold(self.num_batches, num_batches)
        return event

    def _agreed_hold(self, boundaries: Sequence[int], hold: Hold | None) -> Hold:
        """How long boundaries hold, checked; as the boundaries, the same on every rank."""
        error: ValueError | None = None
        num_batches = self.config.hold_batches
        try:
            num_batches = num_batches if hold is None else checked_hold(hold)
        except ValueError as caught:
            error = caught
        number, device = 0 if num_batches == "forever" else num_batches, self.stage.device
        if disagreement([number, *boundaries], "hold and boundaries", device, error) is not None:
            same_everywhere(boundaries, "the boundaries to move to", device)
            problem = disagreement([number], "how many batches the boundaries hold (0: forever)", device, error)
            raise error or ValueError(problem)
        return num_batches

    def warn_once(self, message: str, what: str) -> None:
        """Warn on the first rank, once for each kind of trouble.

        Args:
            message: text.
            what: the kind.
        """
        if what not in self._warned and self.stage.pipeline.rank == 0:
            warn(f"{message}; further ones will not be reported")
        self._warned.add(what)
