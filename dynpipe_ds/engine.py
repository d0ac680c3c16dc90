"""``DynamicPipelineEngine``: what the user holds.

Its methods are the interface; what they do is done by its parts, which :class:`EnabledEngine` makes. The loop itself is
``training.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from torch import nn

from dynpipe_ds.checkpoint.checkpoints import Checkpoints
from dynpipe_ds.checkpoint.load import Wanted
from dynpipe_ds.config import DynamicPipelineConfig, Hold, check_against_model, parse_config
from dynpipe_ds.coupling import coupled_cuts
from dynpipe_ds.decide.balancer import Balancer
from dynpipe_ds.decide.methods import method_at_run_time
from dynpipe_ds.events import Overhead, RebalanceEvent, RepackEvent
from dynpipe_ds.host.differences import warn_of_differences
from dynpipe_ds.host.entering import alone
from dynpipe_ds.host.hooks import Hooks, PipelineEngine, as_whole_batch, check_hooks
from dynpipe_ds.host.instructions import check_schedule, instruction_map
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.host.owned import refuse_unmanaged
from dynpipe_ds.host.pipeline import Pipeline
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.migration.replace import ParameterReplacement
from dynpipe_ds.modes import in_ordinary_mode
from dynpipe_ds.module import DynamicPipelineModule
from dynpipe_ds.partition import check_boundaries
from dynpipe_ds.reporting.measured import gathered_timeline
from dynpipe_ds.reporting.monitor import GuardedMonitor
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import Interval
from dynpipe_ds.snapshots.between import BetweenBatches
from dynpipe_ds.stage import Stage
from dynpipe_ds.training import Training


class DynamicPipelineEngine(PipelineEngine):  # type: ignore[misc]
    """Made by ``deepspeed.initialize(model=DynamicPipelineModule(...), config=...)``.

    Without an enabled ``"dynamic_pipeline"`` section it is DeepSpeed's engine: none of its methods is replaced. With
    one, an engine class of the user's own becomes dynamic as well, whatever it derives from.

    Args:
        *args: arguments of ``PipelineEngine``.
        **kwargs: keyword arguments of ``PipelineEngine``; ``model`` and ``config_class`` by keyword.

    Raises:
        ValueError: on every rank, if the section or the optimizer can't be used, with all problems.
    """

    @property
    def _training(self) -> Training | None:
        """The parts; there are none without the section."""
        return None

    def _need_training(self, what: str) -> Training:
        training = self._training
        if training is None:
            raise RuntimeError(
                f'engine.{what} needs "dynamic_pipeline": {{"enabled": true}} in the DeepSpeed config'
            )
        return training

    @property
    def dynamic_config(self) -> DynamicPipelineConfig:
        """The ``"dynamic_pipeline"`` section; after re-packing, with what belongs to the stages that stayed."""
        return DynamicPipelineConfig() if self._training is None else self._training.config

    @property
    def partition(self) -> tuple[int, ...]:
        """The present boundaries, ``S + 1`` ints: stage s holds layers ``[p[s], p[s + 1])``."""
        return tuple(int(b) for b in self.module.parts)

    @property
    def order(self) -> Order | None:
        """What every stage runs in a training batch, in which sequence; ``None`` without the section."""
        return None if self._training is None else self._training.order

    @property
    def profile(self) -> PipelineProfile | None:
        """The newest profile, smoothed over ``profile_batches``; ``None`` before the first batch."""
        return None if self._training is None else self._training.profile

    @property
    def last_batch_profile(self) -> PipelineProfile | None:
        """The profile of the newest profiled batch alone (its ``batch`` says which); ``None`` before the first one."""
        return None if self._training is None else self._training.last_profile

    @property
    def profiling(self) -> bool:
        """Whether batches are profiled.

        Set it to ``False`` (on every rank) to do without profiles, and so without automatic re-partitions, for a while.
        """
        return self._training is not None and self._training.profiling

    @profiling.setter
    def profiling(self, value: bool) -> None:
        self._need_training("profiling").profiling = value

    @property
    def overhead(self) -> Overhead:
        """Seconds that this rank has spent on not training; none without the section."""
        return Overhead() if self._training is None else self._training.overhead

    @property
    def last_checkpoint(self) -> str | None:
        """Newest complete checkpoint that this run saved or loaded; ``None`` before the first one."""
        return None if self._training is None else self._training.checkpoints.last

    @property
    def stage_optimizer(self) -> StageOptimizer | None:
        """What moves the optimizer's state; ``None`` where there is no optimizer."""
        return None if self._training is None else self._training.stage.optimizer

    def micro_batch_seconds(self) -> dict[int, tuple[list[float], list[float]]]:
        """Seconds of this stage's layers in each micro-batch of the newest profiled batch, by global layer index.

        A profile has their means. Where work varies within a batch, a pipeline waits for the longer ones.

        Returns:
            Forward and backward seconds, M each; empty before the first batch.
        """
        return self._need_training("micro_batch_seconds").profiler.recorder.by_micro_batch()

    @in_ordinary_mode
    def timeline(self) -> tuple[Interval, ...]:
        """What every stage did when in the newest profiled batch; collective over all ranks.

        ``dynpipe_ds.reporting.save_gantt`` draws it, ``save_chrome_trace`` writes it for Perfetto.

        Returns:
            Intervals of this rank's replica of the pipeline, on one clock; none before the first profiled batch.
        """
        training = self._need_training("timeline")
        return gathered_timeline(training.profiler.recorder, training.pipeline.replica, training.pipeline.stage_id)

    @in_ordinary_mode
    def whole_backwards(self) -> dict[int, tuple[str, ...]]:
        """Why stages run backwards whole that a planned order splits; collective over all ranks.

        Returns:
            Reasons by stage; none where all could be split so far.
        """
        return self._need_training("whole_backwards").pipeline.whole_backwards()

    def local_layers(self) -> dict[int, nn.Module]:
        """The live modules on this stage by global layer index; function layers are left out."""
        if self._training is not None:
            return self._training.stage.local_layers()
        start = self.module._local_start
        functions = enumerate(self.module.forward_funcs)
        return {start + i: f for i, f in functions if isinstance(f, nn.Module)}

    def on_rebalance(self, callback: Callable[[RebalanceEvent], Any]) -> Callable[[RebalanceEvent], Any]:
        """Call a function on every rank after every change of partition; usable as a decorator.

        Args:
            callback: gets a :class:`RebalanceEvent`.

        Returns:
            The callback.
        """
        self._need_training("on_rebalance").callbacks.append(callback)
        return callback

    def on_repack(self, callback: Callable[[RepackEvent], Any]) -> Callable[[RepackEvent], Any]:
        """Call a function after re-packing on every rank, also on those that leave; usable as a decorator.

        Args:
            callback: gets a :class:`RepackEvent`. On a rank that leaves, its ``released`` is true, no
                collective works any more, and the process ends with exit code 0 when the callbacks return.

        Returns:
            The callback.
        """
        self._need_training("on_repack").repacker.callbacks.append(callback)
        return callback

    def between_batches(self, acts: BetweenBatches) -> BetweenBatches:
        """Let the engine call what the script does between batches, so that it can repeat it; on every rank.

        With ``survive`` enabled, training may go back to a snapshot and repeat the batches since. What changes layers
        between batches must then be repeated, too: given here, it is called around every batch. Without it, a change
        that the engine notices (freezing, replaced parameters) makes older snapshots useless.

        A worker that joins goes on with what the first rank's knew: there its ``load_state_dict`` is called, in here.

        Args:
            acts: called before and after each batch, in the order in which they were given.

        Returns:
            The same.
        """
        self._need_training("between_batches").repeating.add(acts)
        return acts

    def data_at(self, open_at: Callable[[int, int], Iterable[Any]]) -> Callable[[int, int], Iterable[Any]]:
        """Say how to read the data of earlier batches once more; on every rank, usable as a decorator.

        With ``survive`` enabled, training may go back to a checkpoint, further than the micro-batches that are kept.
        An iterator that has ``state_dict`` and ``load_state_dict`` can go back by itself. For others, give this.

        Args:
            open_at: called with the number of a batch, counted from 0, and of a data-parallel replica, as counted when
                the job began, lost ones included. Gives an iterable of micro-batches of the size that the JSON asks
                for, from the first one of that batch on, as that replica reads them: the same values each time.

        Returns:
            The function.
        """
        self._need_training("data_at").pipeline.reading.open_at = open_at
        return open_at

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
        training = self._need_training("rebalance")
        return training.surviving(training.rebalance)

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
        training = self._need_training("repartition")
        return training.surviving(lambda: training.repartition(boundaries, hold))

    @in_ordinary_mode
    def repack(self, num_stages: int) -> RepackEvent:
        """Go on with fewer stages, or with more; whatever throughput that costs. Collective over all ranks.

        Fewer: the ranks that are not needed any more leave. On them this call does not return, the process ends with
        exit code 0. Those that stay are numbered anew, in their order.

        More: workers that wait (:meth:`num_waiting`) come in as stages before the last one, and layers move to them.
        On a worker that joins, ``deepspeed.initialize`` returns when that is done, with ``engine.global_steps`` of all;
        its script goes on from there as after loading a checkpoint, its data included. So call this behind
        ``train_batch``, at the end of a step.

        Args:
            num_stages: n, at least 1 and another number than now.

        Returns:
            What happened.

        Raises:
            RuntimeError: if no batch was profiled yet.
            RepackError: on every rank, if it can't be done or failed; training can go on with all ranks.
        """
        return self._need_training("repack").repacker.repack(num_stages)

    @in_ordinary_mode
    def set_num_micro_batches(self, num_micro_batches: int) -> None:
        """Run the next batches in another number of micro-batches, with the same samples; collective.

        The batch stays as large, so each micro-batch has fewer or more samples. The iterators go on to give
        micro-batches of the size that the JSON asks for, which are cut or joined. Evaluation is left alone. The same
        samples are added up in another order, so losses differ by rounding (``docs/elastic.md``).

        Args:
            num_micro_batches: M, a divisor of the samples of a batch on each replica; the same on every rank.

        Raises:
            ValueError: on every rank, if it parts the batch unevenly, differs between ranks, or the data can't be cut.
        """
        self._need_training("set_num_micro_batches").set_num_micro_batches(num_micro_batches)

    @in_ordinary_mode
    def num_waiting(self) -> int:
        """How many workers fit and wait to join; collective over all ranks. 0 without ``elastic.enabled``."""
        return 0 if self._training is None else self._training.repacker.growing.num_waiting()

    def share_with_newcomers(self, values: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
        """Say what workers that join are to find in :attr:`joined_with`; usable as a decorator.

        Args:
            values: called on the first rank when workers join; gives plain values and tensors, as ``client_state`` of
                :meth:`save_checkpoint`.

        Returns:
            The function.
        """
        self._need_training("share_with_newcomers").repacker.growing.client_state = values
        return values

    @property
    def joined_with(self) -> dict[str, Any] | None:
        """What :meth:`share_with_newcomers` gave when this worker joined; ``None`` on a rank from the start."""
        return None if self._training is None else self._training.joined_with

    @in_ordinary_mode
    def replace_parameters(self, replacements: Sequence[ParameterReplacement]) -> None:
        """Give local layers parameters of another shape, with their optimizer state; collective.

        Args:
            replacements: those of this rank's layers; the same on all replicas of a stage, may be empty.

        Raises:
            MigrationError: on every rank, with the same text, if any rank failed; nothing has changed then.
        """
        self._need_training("replace_parameters").replace_parameters(replacements)

    def expect_change(self) -> None:
        """Let layers be measured anew, since they will take other times from now on; on every rank.

        Call it between batches, when you have changed what layers compute, or where. Freezing and replacing parameters
        are noticed without it. Every batch is profiled for a while, and decisions count what is profiled from now on.
        """
        if self._training is not None:
            self._training.balancer.expect_change()

    def wait_for_disk(self) -> None:
        """Wait until the newest checkpoint is on the disk of every rank; collective.

        Raises:
            CheckpointError: on every rank, naming the files that could not be pushed there.
        """
        if self._training is not None:
            training = self._training
            training.surviving(lambda: training.checkpoints.wait_for_disk(training))


class EnabledEngine(DynamicPipelineEngine, Hooks):
    """The engine with the section enabled: it has the parts, which the methods that :class:`Hooks` replaces ask.

    Args:
        *args: arguments of ``PipelineEngine``.
        **kwargs: keyword arguments of ``PipelineEngine``; ``model`` and ``config_class`` by keyword.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        module: DynamicPipelineModule = kwargs["model"]
        config = parse_config(kwargs["config_class"]._param_dict)
        check_hooks(type(self))
        method = method_at_run_time(config, module.partition_method)
        num_stages = module.num_stages
        if module.newcomer is not None:
            num_stages = module.newcomer.job["num_stages"]
            alone(module, kwargs["config_class"])
        check_against_model(
            config, num_layers=len(module.layer_names()), num_stages=num_stages,
            num_micro_batches=kwargs["config_class"].gradient_accumulation_steps, partitioner=method.partitioner,
        )
        check_schedule(config.schedule, type(self))
        self._INSTRUCTION_MAP = instruction_map(type(self))
        # DeepSpeed's constructor asks them for the optimizer, so they are made before it and started after it.
        checkpoints, pipeline = Checkpoints(), Pipeline(self, module.make_dynamic())
        if module.owned:
            check_hooks(type(self), owns=True)
        stage = Stage(
            pipeline, module, checkpoints.newest,
            buffer_bytes=config.transfer_buffer_bytes, reads_memory=config.cross_memory,
        )
        self.dynamic: Training = Training(stage, Balancer(config, method, _pinned(config, module)), checkpoints, config)
        if module.newcomer is None:
            self.dynamic.journal.begin()
        super().__init__(*args, **kwargs)
        self.monitor: Any = GuardedMonitor(self.monitor)
        self.dynamic.start(self.monitor)
        warn_of_differences(self)
        if module.newcomer is not None:
            self.dynamic.enter(module.newcomer)
        else:
            self.dynamic.open_doors()

    @property
    def _training(self) -> Training:
        return self.dynamic

    @in_ordinary_mode
    def save_checkpoint(
        self, save_dir: str, tag: Any = None, client_state: dict[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False,
    ) -> bool:
        """As DeepSpeed's ``save_checkpoint``, with the partition, and complete or not there; collective.

        When it returns, the checkpoint survives the end of any process. Threads then push it to the disk, so that
        it survives the end of the machine as well; :meth:`wait_for_disk` waits for them, and so does the next save.

        Args:
            save_dir: folder of all checkpoints.
            tag: name of this one, the same on every rank; by default ``global_step<n>``.
            client_state: values of the user's own, handed back by :meth:`load_checkpoint`.
            save_latest: let the file ``latest`` name it.
            exclude_frozen_parameters: leave out parameters that need no gradient.

        Returns:
            ``True``.

        Raises:
            ValueError: on every rank, if the tag can't name a checkpoint there.
            CheckpointError: on every rank, if any could not do its part; earlier checkpoints are untouched.
        """
        self.dynamic.surviving(lambda: self.dynamic.checkpoints.save(
            self.dynamic, save_dir, tag, client_state or {}, save_latest=save_latest,
            exclude_frozen_parameters=exclude_frozen_parameters,
        ))
        return True

    @in_ordinary_mode
    def load_checkpoint(
        self, load_dir: str, tag: Any = None, load_module_strict: bool = True, load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True, load_module_only: bool = False, custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """As DeepSpeed's ``load_checkpoint``, for any partition, number of stages and replicas; collective.

        Args:
            load_dir: folder of all checkpoints.
            tag: name of one; by default what the file ``latest`` names.
            load_module_strict: whether the names of tensors must agree.
            load_optimizer_states: whether to take in the optimizer's state.
            load_lr_scheduler_states: whether to take in the learning-rate scheduler's.
            load_module_only: take in weights only.
            custom_load_fn: not supported by pipelines.

        Returns:
            Path of DeepSpeed's file for this stage and the user's values; ``(None, None)`` if there is no
            tag and no ``latest``.

        Raises:
            ValueError: on every rank, if the tag can't name a checkpoint, or it is a universal one and replicas own
                parameters.
            CheckpointError: on every rank, if it is damaged or does not fit; nothing has changed then.
        """
        if self.load_universal_checkpoint():
            if self.module.owned:
                raise ValueError(
                    "universal checkpoints know one value of every parameter, and replicas own some here "
                    "(own_by_replica); load a checkpoint of this library"
                )
            found: tuple[str | None, dict[str, Any] | None] = super().load_checkpoint(
                load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states,
                load_module_only, custom_load_fn,
            )
            self.dynamic.snapshots.start_afresh()
            self.dynamic.landmarks.forget()
            return found
        if custom_load_fn is not None:
            raise ValueError("custom_load_fn is not supported by pipelines: leave it out")
        wanted = Wanted(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        return self.dynamic.surviving(lambda: self.dynamic.checkpoints.load(self.dynamic, load_dir, tag, wanted))


def _pinned(config: DynamicPipelineConfig, module: DynamicPipelineModule) -> set[int]:
    """Cuts that no partition may have, the first one included."""
    pinned = {*module.pinned_cuts, *config.pinned_cuts, *coupled_cuts(module.couplings(), module.boundaries)}
    check_boundaries(
        module.boundaries, num_layers=len(module.layer_names()), num_stages=module.num_stages,
        pinned=tuple(sorted(pinned)), allow_empty=True,
    )
    return pinned


def engine_class(called: type, deepspeed_config: Any, model: Any = None) -> type:
    """The class of an engine whose model is a :class:`DynamicPipelineModule`.

    Args:
        called: DeepSpeed's class, or one of the user's that derives from it.
        deepspeed_config: DeepSpeed's ``DeepSpeedConfig``; ``None`` if none was given.
        model: the model; without it, it is not looked at.

    Raises:
        ValueError: on every rank, if replicas own parameters of the model, and the engine would be DeepSpeed's.
    """
    try:
        enabled = deepspeed_config is not None and parse_config(deepspeed_config._param_dict).enabled
    except ValueError:
        enabled = True  # its constructor says what is wrong
    if enabled:
        return _enabled(called)
    if model is not None:
        refuse_unmanaged(model)
    return DynamicPipelineEngine if issubclass(DynamicPipelineEngine, called) else called


@cache
def _enabled(called: type) -> type:
    """A dynamic engine that is all that a user's class is: its methods go first, and find ours behind them."""
    if issubclass(EnabledEngine, called):
        return EnabledEngine
    if issubclass(called, EnabledEngine):
        return called
    train_batch = called.train_batch  # type: ignore[attr-defined]
    own = {} if train_batch is PipelineEngine.train_batch else {"train_batch": as_whole_batch(train_batch)}
    return type(called.__name__, (called, EnabledEngine), {**own, "__module__": called.__module__})
