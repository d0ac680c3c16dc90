"""``DynamicPipelineEngine``: DeepSpeed's pipeline engine that profiles, decides and moves layers.

``train_batch`` reads top to bottom: run the batch with the recorder on, gather one profile, ask the
controller, carry out the plan (``balancing.py``). Everything else here is API and wiring.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER
from torch import Tensor, nn

from dynpipe_ds.checkpoint.engine import CheckpointingEngine
from dynpipe_ds.config import DynamicPipelineConfig, Hold, check_against_model, checked_hold, parse_config
from dynpipe_ds.coupling import coupled_cuts
from dynpipe_ds.decide.methods import PartitionMethod, method_at_run_time
from dynpipe_ds.events import RebalanceEvent
from dynpipe_ds.host.data_position import DataPosition
from dynpipe_ds.host.differences import warn_of_differences
from dynpipe_ds.host.gradient_norm import GradientNorm, clip_gradients, sums_of_squares
from dynpipe_ds.host.instructions import instruction_map
from dynpipe_ds.host.optimizers.flat import stage_optimizer
from dynpipe_ds.host.optimizers.groups import (
    ParameterGroups,
    add_copies,
    agree_on_groups,
    check_scheduler,
)
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.host.passing import BatchRefused, begin, refuse_together
from dynpipe_ds.host.reducing import ReducingEngine
from dynpipe_ds.measure.profile import PipelineProfile, smooth
from dynpipe_ds.measure.recorder import ActivationMeter
from dynpipe_ds.messages.obstacles import check_cuts
from dynpipe_ds.migration.freeze import check_replicas, rebuild_optimizer, trainable_flags
from dynpipe_ds.migration.hooks import remove_everywhere
from dynpipe_ds.migration.migrate import Migration
from dynpipe_ds.migration.packing import PackingError
from dynpipe_ds.migration.replace import ParameterReplacement, replace_parameters
from dynpipe_ds.migration.transaction import MigrationError
from dynpipe_ds.modes import in_ordinary_mode
from dynpipe_ds.module import DynamicPipelineModule
from dynpipe_ds.partition import Plan, check_boundaries
from dynpipe_ds.ranks.agreement import anywhere, disagreement, same_everywhere, together
from dynpipe_ds.ranks.heartbeat import start_heartbeat
from dynpipe_ds.repacking.engine import RepackingEngine

# Sizes change rarely, and measuring them costs a Python call per saved tensor and parameter.
_SIZES_EVERY = 10

T = TypeVar("T")


class DynamicPipelineEngine(RepackingEngine, CheckpointingEngine, ReducingEngine):
    """Made by ``deepspeed.initialize(model=DynamicPipelineModule(...), config=...)``.

    Without an enabled ``"dynamic_pipeline"`` section it behaves as DeepSpeed's engine.

    Args:
        *args: arguments of ``PipelineEngine``.
        **kwargs: keyword arguments of ``PipelineEngine``; ``model`` and ``config_class`` by keyword.

    Attributes:
        profiling: whether batches are profiled; set it to ``False`` (on every rank) to do without
            profiles, and so without automatic re-partitions, for a while.
        last_checkpoint: newest complete checkpoint that this run saved or loaded.
        overhead: seconds that this rank has spent on not training (:class:`~dynpipe_ds.Overhead`).

    Raises:
        ValueError: on every rank, if the section or the optimizer can't be used, with all problems.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        module: DynamicPipelineModule = kwargs["model"]
        self.dynamic_config: DynamicPipelineConfig = parse_config(kwargs["config_class"]._param_dict)
        self.stage_optimizer: StageOptimizer | None = None
        self.last_checkpoint: str | None = None
        self._in_batch = self._is_started = False
        self.data_position = DataPosition()
        self._groups: ParameterGroups | None = None
        if self.dynamic_config.enabled:
            self._method = method_at_run_time(self.dynamic_config, module.partition_method)
            check_against_model(
                self.dynamic_config, num_layers=module._num_layers, num_stages=module.num_stages,
                partitioner=self._method.partitioner,
            )
            self._INSTRUCTION_MAP = instruction_map(type(self))
            self._tied_copies = module.make_dynamic()
        super().__init__(*args, **kwargs)
        if self.dynamic_config.enabled:
            self._start_dynamic()

    def _start_dynamic(self) -> None:
        if self.is_pipe_partitioned or self.is_grad_partitioned:
            raise ValueError(
                "dynamic_pipeline sends whole activations; with tensor parallelism set "
                '"pipeline": {"pipe_partitioned": false, "grad_partitioned": false}'
            )
        coupled = coupled_cuts(self.module.couplings(), self.partition)
        self._pinned = tuple(sorted({*self.module.pinned_cuts, *self.dynamic_config.pinned_cuts, *coupled}))
        check_boundaries(
            self.partition, num_layers=self.module._num_layers, num_stages=self.num_stages,
            pinned=self._pinned, allow_empty=True,
        )
        same_everywhere(self.partition, "the first partition", self.device)
        layers, names = self.local_layers(), self.module.layer_names()
        together(lambda: self.module.surroundings.check(layers, names, self), self.device, PackingError)
        self.profiling = True
        self._start_balancing()
        self._start_repacking()
        self._heartbeat = start_heartbeat()
        self._trainable = trainable_flags(self.module)
        self._norm = GradientNorm(
            self.module.layer_of_parameter, num_layers=self.module._num_layers,
            grid=self.grid, device=self.device,
        )
        self._is_started = True
        self._adopt_optimizer()
        warn_of_differences(self)

    def _adopt_optimizer(self) -> None:
        """Learn to move the optimizer's state; it may be made by ``initialize`` or later."""
        if self.optimizer is not None:
            assert self._groups is not None
            self.stage_optimizer = stage_optimizer(self, self._groups)
            self._settle()

    # -- public API ---------------------------------------------------------------------------

    @property
    def profile(self) -> PipelineProfile | None:
        """The newest profile, smoothed over ``profile_batches``; ``None`` before the first batch."""
        newest = self._controller.newest if self.dynamic_config.enabled else []
        return smooth(newest, self.dynamic_config.smoothing) if newest else None

    @property
    def last_batch_profile(self) -> PipelineProfile | None:
        """The profile of the newest profiled batch alone (its ``batch`` says which); ``None`` before the first one."""
        newest = self._controller.newest if self.dynamic_config.enabled else []
        return newest[-1] if newest else None

    def micro_batch_seconds(self) -> dict[int, tuple[list[float], list[float]]]:
        """Seconds of this stage's layers in each micro-batch of the newest profiled batch, by global layer index.

        A profile has their means. Where work varies within a batch, a pipeline waits for the longer ones.

        Returns:
            Forward and backward seconds, M each; empty before the first batch.
        """
        self._need_dynamic("micro_batch_seconds")
        return self._recorder.by_micro_batch()

    def local_layers(self) -> dict[int, nn.Module]:
        """The live modules on this stage by global layer index; function layers are left out."""
        if not self.dynamic_config.enabled:
            start = self.module._local_start
            functions = enumerate(self.module.forward_funcs)
            return {start + i: f for i, f in functions if isinstance(f, nn.Module)}
        return self.module.local_layers()

    def on_rebalance(self, callback: Callable[[RebalanceEvent], Any]) -> Callable[[RebalanceEvent], Any]:
        """Call a function on every rank after every change of partition; usable as a decorator.

        Args:
            callback: gets a :class:`RebalanceEvent`.

        Returns:
            The callback.
        """
        self._need_dynamic("on_rebalance")
        self._callbacks.append(callback)
        return callback

    @in_ordinary_mode
    def rebalance(self) -> RebalanceEvent | None:
        """Choose boundaries from the present profile and move to them, whatever the gain; collective.

        What :meth:`repartition` chose is held no longer.

        Returns:
            What happened, or ``None`` if the boundaries stay.

        Raises:
            RuntimeError: if no batch was profiled yet.
            ValueError: on every rank, if no partition satisfies the constraints.
            MigrationError: on every rank, if moving failed; the old partition is then in force.
        """
        self._need_dynamic("rebalance")
        if not self._controller.newest:
            raise RuntimeError("there is no profile to rebalance from; train one batch first")
        started = time.perf_counter()
        with self._naming_lost_ranks("a partition was chosen"):
            plan, failure = self._plan(self._planning_profile())
            if plan is None:
                raise failure or AssertionError
            event = self._move_to(plan, time.perf_counter() - started)
            self._controller.release()
            return event

    @in_ordinary_mode
    def repartition(self, boundaries: Sequence[int], *, hold: Hold | None = None) -> RebalanceEvent | None:
        """Move to given boundaries; collective over all ranks.

        They hold: for some batches neither ``rebalance_every`` nor ``repack`` changes them. A later call of this, of
        :meth:`rebalance` or of :meth:`repack` does, and ends the hold.

        Args:
            boundaries: ``S + 1`` ints, the same on every rank.
            hold: how many of the next batches run on them at least, 1 or more; ``"forever"``: until the next such
                call; ``None``: as the key ``hold_batches`` says. The same on every rank.

        Returns:
            What happened, or ``None`` if these are the present boundaries (they hold from now on, too).

        Raises:
            ValueError: on every rank, if the boundaries or the hold break a rule or differ between ranks, or if one
                cuts behind a layer that was seen to return what can't be sent to another stage.
            MigrationError: on every rank, if moving failed; the old partition is then in force.
        """
        self._need_dynamic("repartition")
        with self._naming_lost_ranks("boundaries were compared"):
            same_everywhere(boundaries, "the boundaries to move to", self.device)
            num_batches = self._agreed_hold(hold)
        check_cuts(boundaries, self._obstacles, self.module.layer_names())
        checked = check_boundaries(
            boundaries, num_layers=self.module._num_layers, num_stages=self.num_stages,
            pinned=self._pinned, allow_empty=self.dynamic_config.allow_empty_stages,
        )
        profile = self.profile
        method = PartitionMethod(boundaries=checked)
        plan = Plan(checked, bottleneck=0.0) if profile is None else method.plan(
            profile, self.num_stages, current=self.partition, allow_empty=True
        )
        event = self._move_to(plan, 0.0)
        self._controller.hold(self._num_batches, num_batches)
        return event

    def _agreed_hold(self, hold: Hold | None) -> Hold:
        """What a call says of how long it holds, checked and the same on every rank; collective."""
        error: ValueError | None = None
        num_batches = self.dynamic_config.hold_batches
        try:
            num_batches = num_batches if hold is None else checked_hold(hold)
        except ValueError as caught:
            error = caught
        number = 0 if num_batches == "forever" else num_batches
        problem = disagreement([number], "how many batches the boundaries hold (0: forever)", self.device, error)
        if problem is not None:
            raise error or ValueError(problem)
        return num_batches

    @in_ordinary_mode
    def replace_parameters(self, replacements: Sequence[ParameterReplacement]) -> None:
        """Give local layers parameters of another shape, with their optimizer state; collective.

        Args:
            replacements: those of this rank's layers; the same on all replicas of a stage, may be empty.

        Raises:
            MigrationError: on every rank, with the same text, if any rank failed; nothing has changed then.
        """
        self._need_dynamic("replace_parameters")
        started = time.perf_counter()
        self._notice_frozen_layers()
        with self._changing("parameters were replaced"):
            replace_parameters(self, replacements)
            self._settle()
        self._controller.expect_change()
        self.overhead.migrating_s += time.perf_counter() - started

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Train one batch, then move layers if that pays; otherwise as DeepSpeed's ``train_batch``.

        Args:
            data_iter: iterator over micro-batches.

        Returns:
            The mean loss of the batch.
        """
        loss: Tensor = self._whole_batch(partial(super().train_batch, data_iter))
        return loss

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let a subclass's own ``train_batch`` be one whole batch, whether it calls this class's or not."""
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("train_batch")
        if own is None:
            return

        @wraps(own)
        def train_batch(self: DynamicPipelineEngine, *args: Any, **kwargs: Any) -> Any:
            return self._whole_batch(partial(own, self, *args, **kwargs))

        cls.train_batch = train_batch  # type: ignore[method-assign]

    def _whole_batch(self, run: Callable[[], T]) -> T:
        """Run a batch, and what belongs around it unless that is being done already."""
        if not self.dynamic_config.enabled or self._in_batch:
            return run()
        self._in_batch = True
        try:
            with self._naming_lost_ranks(f"batch {self._num_batches} was trained"):
                return self._train_batch(run)
        finally:
            self._in_batch = False

    def _train_batch(self, run: Callable[[], T]) -> T:
        self._notice_frozen_layers()
        self.reset_activation_shape()  # what crosses a boundary is announced anew in every batch
        profiles = self.profiling and self._wants_profile()
        try:
            result, meter = self._run_batch(run, profiles)
        except BatchRefused:
            self._forget_batch()
            raise
        self._num_batches += 1
        self.note_batch_read()
        if profiles:
            with self._no_way_back(f"stages were balanced after batch {self._num_batches}"):
                if self._take_profile(meter.num_bytes if meter is not None else None):
                    self._maybe_rebalance()
                    self._maybe_repack()
        return result

    def _forget_batch(self) -> None:
        """Let the next batch, or a move, begin as if the one that was refused had not been there."""
        timer = self.timers(TRAIN_BATCH_TIMER)
        if getattr(timer, "started_", False):  # a client's own train_batch need not use it
            timer.stop()
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def _run_batch(self, run: Callable[[], T], profiles: bool) -> tuple[T, ActivationMeter | None]:
        """Run a batch, with the recorder on or off; with a meter of activations when their sizes are due."""
        if not profiles:
            return run(), None
        meter, last = None, self.last_batch_profile
        if self._measure_sizes or last is None or last.batch // _SIZES_EVERY != self._num_batches // _SIZES_EVERY:
            meter, self._measure_sizes = ActivationMeter(self.module), False
        self.module.recorder = self._recorder
        self._recorder.start(meter)
        try:
            return run(), meter
        finally:
            self.module.recorder = None

    def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's ``eval_batch``, on the present partition.

        Args:
            *args: arguments of ``PipelineEngine.eval_batch``.
            **kwargs: its keyword arguments.

        Returns:
            What DeepSpeed's returns: the mean loss, with ``return_logits`` also the logits.
        """
        if not self.dynamic_config.enabled:
            return super().eval_batch(*args, **kwargs)
        self.reset_activation_shape()
        training_iterator = self.data_iterator
        try:
            with self._naming_lost_ranks("a batch was evaluated"):
                return super().eval_batch(*args, **kwargs)
        except BatchRefused:
            self.set_dataiterator(training_iterator)
            raise

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        if not self.dynamic_config.enabled:
            super()._exec_schedule(pipe_schedule)
            return
        begin(self)
        super()._exec_schedule(pipe_schedule)
        refuse_together(self)  # in evaluation; in training it was done before the step

    # -- moving layers ------------------------------------------------------------------------

    def _migrate(self, boundaries: Sequence[int]) -> None:
        if self.stage_optimizer is None and tuple(boundaries) != self.partition:
            raise MigrationError(
                "layers can't move without an optimizer to tell: make it first, in deepspeed.initialize or by "
                "engine._configure_optimizer"
            )
        self._notice_frozen_layers()
        buffer_bytes = self.dynamic_config.transfer_buffer_bytes
        with self._changing("layers were moved"):
            Migration(self, boundaries, buffer_bytes=buffer_bytes).run()
            self._settle()

    @contextmanager
    def _changing(self, doing: str) -> Iterator[None]:
        """Around a change of layers or parameters: a ``MigrationError`` has undone it, all else can't be undone."""
        refused: MigrationError | None = None
        with self._no_way_back(doing):
            try:
                yield
            except MigrationError as error:
                refused = error
        if refused is not None:
            raise refused

    def _settle(self) -> None:
        """Renew what DeepSpeed caches about a stage's layers."""
        self.reset_activation_shape()
        for buffers in self.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)
        self._trainable = trainable_flags(self.module)
        self._measure_sizes = True
        self._norm.install(self.optimizer)

    # -- frozen layers ------------------------------------------------------------------------

    def _notice_frozen_layers(self) -> None:
        """Rebuild the optimizer where the user froze or unfroze layers since the last batch; collective.

        Raises:
            ValueError: on every rank, if the replicas of a stage differ in what they froze.
            MigrationError: on every rank, if any rank could not do its part; its optimizer is then as before.
        """
        if self.stage_optimizer is None:
            return
        started = time.perf_counter()
        has_changed = self._trainable != trainable_flags(self.module)
        surroundings, layers = self.module.surroundings, self.local_layers()
        if not anywhere(has_changed or surroundings.hooks.has_removed(), self.device):
            return
        remove_everywhere(surroundings.hooks, layers)
        together(lambda: surroundings.check_frozen(layers), self.device, ValueError)
        self._controller.expect_change()
        check_replicas(self)
        with self._changing("layers were frozen"):
            rebuild_optimizer(self, has_changed=has_changed)
            if has_changed:
                self._settle()
        self.overhead.migrating_s += time.perf_counter() - started

    # -- what DeepSpeed calls -----------------------------------------------------------------

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        if not self.dynamic_config.enabled:
            super()._configure_optimizer(client_optimizer, model_parameters)
            return
        parameters = add_copies(self._tied_copies, client_optimizer, list(model_parameters))
        basic = together(lambda: self._basic_optimizer(client_optimizer, parameters), self.device, ValueError)
        agree_on_groups(basic)
        check_scheduler(self.client_lr_scheduler, len(basic.param_groups))
        self._groups = ParameterGroups(basic, device=self.device, dtype=self.get_data_types()[0])
        self._groups.install(trainable_only=self.zero_optimization() or self.bfloat16_enabled())
        self.name_parameters()
        super()._configure_optimizer(basic, parameters)
        if self._is_started:
            self._adopt_optimizer()

    def _basic_optimizer(self, client_optimizer: Any, parameters: list[Any]) -> torch.optim.Optimizer:
        if isinstance(client_optimizer, torch.optim.Optimizer):
            return client_optimizer
        if client_optimizer is not None:
            optimizer: torch.optim.Optimizer = client_optimizer(parameters or [{"params": []}])
            return optimizer
        built: torch.optim.Optimizer = self._configure_basic_optimizer(parameters or [{"params": []}])
        return built

    def name_parameters(self) -> None:
        """Renew the table of parameter names that DeepSpeed's optimizers and checkpoints use."""
        self.param_names = {parameter: name for name, parameter in self.module.named_parameters()}
        for i, placeholder in enumerate(self._groups.placeholders if self._groups else ()):
            self.param_names[placeholder] = f"placeholder.{i}"

    def clip_fp32_gradients(self) -> None:
        """Clip by one norm over all stages (DeepSpeed's counts the first stage only)."""
        if not self.dynamic_config.enabled:
            super().clip_fp32_gradients()
            return
        parameters = list(self.module.parameters())
        gradients = ((p, p.grad) for p in parameters if p.grad is not None)
        self._global_grad_norm = self._norm(sums_of_squares(gradients))
        clip_gradients(parameters, self._global_grad_norm, self.gradient_clipping())

    def _take_model_step(self, lr_kwargs: Any) -> None:
        if self.stage_optimizer is not None:
            self.stage_optimizer.before_step()
        num_skipped = self.skipped_steps
        super()._take_model_step(lr_kwargs)
        if self.stage_optimizer is not None and self.skipped_steps == num_skipped:
            self.stage_optimizer.after_step()

    def _need_dynamic(self, what: str) -> None:
        if not self.dynamic_config.enabled:
            raise RuntimeError(
                f'engine.{what} needs "dynamic_pipeline": {{"enabled": true}} in the DeepSpeed config'
            )
