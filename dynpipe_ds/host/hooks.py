"""Every method of DeepSpeed's engine that a dynamic engine replaces: each calls a part of ours, and DeepSpeed's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine as PipelineEngine  # for engine.py
from deepspeed.runtime.pipe.schedule import InferenceSchedule
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from dynpipe_ds.host.compiling import check_arguments
from dynpipe_ds.host.optimizers.native_adam import whole_lanes
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.host.order import planned
from dynpipe_ds.host.owned import not_broadcast, without_owned
from dynpipe_ds.host.passing import BatchRefused, begin, refuse_together
from dynpipe_ds.host.pipeline import Pipeline
from dynpipe_ds.host.reducing import in_replica_order, install_order
from dynpipe_ds.ranks.fatal import RankLostError
from dynpipe_ds.schedule import Order

T = TypeVar("T")


class Parts(Protocol):
    """What the methods below call: a dynamic engine."""

    @property
    def pipeline(self) -> Pipeline:
        """DeepSpeed's engine."""

    @property
    def stage_optimizer(self) -> StageOptimizer | None:
        """What moves the optimizer's state."""

    def train_batch(self, run: Callable[[], T]) -> T:
        """Run a batch and what belongs around it."""

    @property
    def survives(self) -> bool:
        """Whether ranks go on without those that are lost."""

    def surviving(self, action: Callable[[], T]) -> T:
        """Do something between batches, and again if ranks are lost meanwhile and the others go on."""

    def naming_lost_ranks(self, doing: str) -> AbstractContextManager[None]:
        """Name whoever is lost inside."""

    def optimizer_was_made(self) -> None:
        """Take note of an optimizer, which may be made late."""

    def layers_were_compiled(self) -> None:
        """Take note that layers take other times."""

    def before_step(self) -> None:
        """Get ready for the optimizer's step, in which parameters change."""

    def end(self) -> None:
        """Let go of what outlives batches."""


class Hooks(PipelineEngine):  # type: ignore[misc]
    """A pipeline engine that asks its parts, which the dynamic one makes before DeepSpeed's constructor."""

    dynamic: Parts

    # -- batches ------------------------------------------------------------------------------

    def train_batch(self, data_iter: Any = None) -> Tensor:
        """Train one batch, then move layers if that pays; otherwise as DeepSpeed's ``train_batch``.

        Args:
            data_iter: iterator over micro-batches.

        Returns:
            The mean loss of the batch.
        """
        loss: Tensor = self.dynamic.train_batch(partial(super().train_batch, data_iter))
        return loss

    def eval_batch(self, data_iter: Any, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's ``eval_batch``, on the present partition.

        Args:
            data_iter: iterator over micro-batches.
            *args: further arguments of ``PipelineEngine.eval_batch``.
            **kwargs: its keyword arguments.

        Returns:
            What DeepSpeed's returns: the mean loss, with ``return_logits`` also the logits.
        """
        reading = self.dynamic.pipeline.reading
        kept = reading.kept
        if len(args) < 5 and reading.num_of_source != self.micro_batches:
            kwargs.setdefault("num_micro_batches", reading.num_of_source)

        def evaluate() -> Any:
            kept.again()
            return self._evaluate(partial(super(Hooks, self).eval_batch, data_iter, *args, **kwargs))

        if not self.dynamic.survives:
            return evaluate()
        number = args[4] if len(args) > 4 else kwargs.get("num_micro_batches")
        with kept.evaluation():
            try:
                result = self.dynamic.surviving(evaluate)
            except BatchRefused:
                reading.note_evaluated(data_iter, self.micro_batches if number is None else number)
                raise
            reading.note_evaluated(data_iter, self.micro_batches if number is None else number)
            return result

    def _evaluate(self, run: Callable[[], Any]) -> Any:
        self.dynamic.pipeline.begin_batch()
        training_iterator = self.data_iterator
        try:
            with self.dynamic.naming_lost_ranks("a batch was evaluated"):
                return run()
        except (BatchRefused, RankLostError) as error:
            if isinstance(error, BatchRefused):
                self.dynamic.pipeline.forget_batch()
            self.set_dataiterator(training_iterator)
            raise

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As DeepSpeed's: compile every layer. Layers that move are compiled again where they arrive.

        Args:
            *args: arguments of ``DeepSpeedEngine.compile``.
            **kwargs: its keyword arguments.

        Raises:
            ValueError: if some of them can't be given again on another rank, or would make gradients depend on the cut.
        """
        check_arguments(self, super().compile, args, kwargs)
        super().compile(*args, **kwargs)
        self.dynamic.layers_were_compiled()

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        pipeline, reading = self.dynamic.pipeline, self.dynamic.pipeline.reading
        to_run = planned(pipe_schedule, pipeline.order_for)
        trains = not isinstance(to_run, InferenceSchedule)
        begin(self, to_run)
        if trains:
            reading.begin()
        reading.slicing.begin(self.micro_batch_size if trains else None)
        order: Order | None = getattr(to_run, "order", None)
        if self.module.recorder is not None:
            self.module.recorder.follow(order, self.stage_id)
        pipeline.in_flight.begin(order.late[self.stage_id] if order is not None and order.late else None)
        try:
            with pipeline.counting_as_dealt() if trains else nullcontext():
                super()._exec_schedule(to_run)
            refuse_together(self)  # in evaluation; in training it was done before the step
        except BatchRefused:  # of anything else nobody knows how far others have read
            reading.note_read(reading.slicing.num_read(pipe_schedule.micro_batches))
            raise
        reading.note_read(reading.slicing.num_read(pipe_schedule.micro_batches))

    def _next_batch(self) -> Any:
        reading = self.dynamic.pipeline.reading
        # What is kept is the loader's, so that a batch that was broken off is cut from its first sample on again.
        return reading.slicing.next(partial(reading.next, super()._next_batch))

    def set_dataloader(self, loader: Any) -> None:
        """As DeepSpeed's; stages that read nothing remember the loader.

        Args:
            loader: gives micro-batches.
        """
        super().set_dataloader(loader)
        self.dynamic.pipeline.reading.keep_loader(loader)

    def set_dataiterator(self, iterator: Any) -> None:
        """As DeepSpeed's; stages that read nothing remember the iterator.

        Args:
            iterator: gives micro-batches.
        """
        super().set_dataiterator(iterator)
        self.dynamic.pipeline.reading.keep_iterator(iterator)

    def destroy(self) -> None:
        """As DeepSpeed's; the process groups are then this engine's no more."""
        self.dynamic.end()
        super().destroy()

    # -- the optimizer ------------------------------------------------------------------------

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        self.dynamic.pipeline.configure_optimizer(client_optimizer, model_parameters, super()._configure_optimizer)
        self.dynamic.optimizer_was_made()

    def _configure_lr_scheduler(self) -> None:
        with self.dynamic.pipeline.twins_hidden():
            super()._configure_lr_scheduler()
        self.dynamic.pipeline.show_users_groups(self.lr_scheduler)

    def get_lr(self) -> list[float]:
        """As DeepSpeed's, for the user's parameter groups alone.

        Returns:
            A learning rate for each; none without an optimizer.
        """
        optimizer, rates = self.dynamic.stage_optimizer, super().get_lr()
        twins = () if optimizer is None else optimizer.groups.twins
        return [rate for group, rate in enumerate(rates) if group not in twins]

    def _broadcast_model(self) -> None:
        with not_broadcast(self.module):
            super()._broadcast_model()

    def _configure_zero_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        pipeline = self.dynamic.pipeline
        with whole_lanes(optimizer, on_host=self._steps_on_host()), pipeline.twins_apart():
            wrapper = super()._configure_zero_optimizer(optimizer)
        pipeline.leave_out_of_sums(wrapper)
        if isinstance(wrapper, DeepSpeedZeroOptimizer):
            install_order(wrapper)
        return wrapper

    def _configure_bf16_optimizer(self, optimizer: torch.optim.Optimizer) -> Any:
        pipeline = self.dynamic.pipeline
        with whole_lanes(optimizer, on_host=self._steps_on_host()), pipeline.twins_apart():
            wrapper = super()._configure_bf16_optimizer(optimizer)
        pipeline.leave_out_of_sums(wrapper)
        return wrapper

    def _steps_on_host(self) -> bool:
        return self.device.type == "cpu" or bool(self.zero_use_cpu_optimizer())

    def clip_fp32_gradients(self) -> None:
        """Clip by one norm over all stages."""
        self.dynamic.pipeline.clip_gradients()

    def _take_model_step(self, lr_kwargs: Any) -> None:
        self.dynamic.before_step()
        optimizer, num_skipped = self.dynamic.stage_optimizer, self.skipped_steps
        if optimizer is not None:
            optimizer.before_step()
        super()._take_model_step(lr_kwargs)
        if optimizer is not None and self.skipped_steps == num_skipped:
            optimizer.after_step()

    def _get_gradients_for_reduction(self) -> tuple[list[Any], dict[str, list[Any]]]:
        found, of_experts = super()._get_gradients_for_reduction()
        return without_owned(self.module, found), of_experts

    def _reduce_non_expert_gradients(self, grads: Sequence[Any], elements_per_buffer: int) -> None:
        if not self._changes_nothing(grads):
            with in_replica_order(self.mpu.get_data_parallel_group()):
                super()._reduce_non_expert_gradients(grads, elements_per_buffer)

    def _changes_nothing(self, gradients: Sequence[Any]) -> bool:
        """Whether reducing gives the same bits: one replica, no rounding on the way."""
        return (
            dist.get_world_size(self.mpu.get_data_parallel_group()) == 1
            and self.gradient_predivide_factor() == 1
            and all(isinstance(g, Tensor) and g.dtype == self.communication_data_type for g in gradients)
        )


_MUST_RUN = (
    "_exec_schedule", "_configure_optimizer", "_configure_zero_optimizer", "_configure_bf16_optimizer",
    "clip_fp32_gradients", "_take_model_step", "_reduce_non_expert_gradients",
)
"""Methods without which losses would depend on the cut; a class of the user's may add to them."""

_FOR_OWNED = ("_broadcast_model", "_get_gradients_for_reduction", "_configure_lr_scheduler")
"""Methods without which DeepSpeed would make equal what single replicas own."""


def check_hooks(engine_class: type, *, owns: bool = False) -> None:
    """Refuse an engine class whose own methods hide ours.

    Args:
        engine_class: of the user, with ours behind it.
        owns: whether it is about the methods that matter only where single replicas own parameters.

    Raises:
        ValueError: if a method that must be called is overridden by one that does not call ``super()``.
    """
    names: tuple[str, ...] = _MUST_RUN
    loss = "losses would depend on the cut"
    if owns:
        names, loss = _FOR_OWNED, "replicas would lose what they own (own_by_replica)"
    for owner in engine_class.__mro__[: engine_class.__mro__.index(Hooks)]:
        for name in names:
            code = getattr(vars(owner).get(name), "__code__", None)
            if code is not None and "super" not in code.co_names:
                raise ValueError(
                    f"{owner.__name__}.{name} hides the one that dynamic_pipeline needs, without which {loss}; call "
                    f"super().{name}(...) in it, or leave it out"
                )


def as_whole_batch(own: Callable[..., T]) -> Callable[..., T]:
    """Let an engine class's own ``train_batch`` be one whole batch, whether it calls DeepSpeed's or not.

    Args:
        own: the method.
    """

    @wraps(own)
    def train_batch(self: Any, *args: Any, **kwargs: Any) -> T:
        result: T = self.dynamic.train_batch(partial(own, self, *args, **kwargs))
        return result

    return train_batch
