"""DeepSpeed's pipeline engine as the rest of the library sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from torch import nn

from dynpipe_ds.host.compiling import check_sections
from dynpipe_ds.host.coordinates import resized
from dynpipe_ds.host.data_position import RandomStreams, random_streams, set_random_streams
from dynpipe_ds.host.gradient_norm import GradientNorm, clip_gradients, sums_of_squares
from dynpipe_ds.host.halves import InFlight
from dynpipe_ds.host.optimizers import twins as owned_groups
from dynpipe_ds.host.optimizers.flat import stage_optimizer
from dynpipe_ds.host.optimizers.groups import ParameterGroups, add_copies, agree_on_groups, check_scheduler
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.host.order import OrderFor, ordered
from dynpipe_ds.host.owned import OwnedGradients
from dynpipe_ds.host.reading import Reading
from dynpipe_ds.host.wires import wires
from dynpipe_ds.messages.channels import Channels
from dynpipe_ds.messages.traffic import Traffic, traffic_in_line, traffic_of
from dynpipe_ds.ranks.agreement import gather, together
from dynpipe_ds.schedule import Order

Copies = list[tuple[nn.Parameter, nn.Parameter]]


class Pipeline:
    """One rank's engine: its place among the ranks, optimizer and micro-batches, what DeepSpeed caches of its layers.

    Args:
        engine: DeepSpeed's, with its module; nothing of it is used before its constructor is through.
        tied_copies: pairs of (shared parameter, its new copy), for optimizers that hold the shared one.

    Attributes:
        engine: as given, for parts of this folder.
        reading: what this rank trains on.
        order_for: which order a training batch runs in place of what :meth:`run_order` said, the same on every rank.
        in_flight: micro-batches of the present batch.
        owned: gradients of what this replica owns.
        channels: what carries activations and gradients.
    """

    def __init__(self, engine: Any, tied_copies: Copies) -> None:
        self.engine = engine
        self.reading = Reading(engine)
        self._order: Order | None = None
        self.order_for: OrderFor = lambda m, s: ordered(self._order, m, s)
        self.in_flight = InFlight()
        self.owned = OwnedGradients(engine)
        self._tied_copies = tied_copies
        self._groups: ParameterGroups | None = None
        self._norm: GradientNorm | None = None
        self.channels: Channels
        self._traffic: tuple[Order, Traffic] | None = None
        self._before: tuple[dict[str, int], RandomStreams]

    def start(self, layer_of: Callable[[], dict[nn.Parameter, int]], num_layers: int) -> None:
        """Begin, after DeepSpeed's constructor.

        Raises:
            ValueError: if DeepSpeed's configuration asks for what can't be.
        """
        check_sections(self.engine)
        self.reading.start()
        self.connect()
        self.measure_norm(layer_of, num_layers)

    def measure_norm(self, layer_of: Callable[[], dict[nn.Parameter, int]], num_layers: int) -> None:
        """Begin to measure the norm of gradients; again in a world with another number of replicas.

        Args:
            layer_of: layer index of every parameter on this stage.
            num_layers: L.
        """
        owns = bool(self.engine.module.owned)
        self._norm = GradientNorm(
            layer_of, num_layers=num_layers, owns=owns, grid=self.engine.grid, device=self.device
        )

    def connect(self) -> None:
        """Open the channels to the neighbouring stages; collective over all ranks, again when these are others."""
        stages = [self.ranks_of(stage) for stage in range(self.num_stages)]
        self.channels = Channels(wires(stages, self.rank), self.device, self.stage_id)
        self._traffic = None

    def run_order(self, order: Order | None) -> None:
        """Let the next training batches run an order where it fits them, 1F1B elsewhere.

        Args:
            order: the same on every rank; ``None``: 1F1B.
        """
        self._order = order

    def traffic_of(self, pipe_schedule: Any) -> Traffic:
        """The messages of this stage in a schedule; kept, since nearly every batch has the same.

        Args:
            pipe_schedule: DeepSpeed's, or one that runs an order of ours.
        """
        order = getattr(pipe_schedule, "order", None)
        if order is None:
            if type(pipe_schedule) is schedule.InferenceSchedule:
                return traffic_in_line(pipe_schedule.micro_batches, self.stage_id, self.num_stages)
            return Traffic()
        if self._traffic is None or self._traffic[0] is not order:
            self._traffic = order, traffic_of(order, self.stage_id)
        return self._traffic[1]

    # -- its place ----------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where this rank computes and the communication back-end works."""
        device: torch.device = self.engine.device
        return device

    @property
    def rank(self) -> int:
        """This process's number in the world."""
        return int(self.engine.global_rank)

    @property
    def stage_id(self) -> int:
        """This rank's stage."""
        return int(self.engine.stage_id)

    @property
    def num_stages(self) -> int:
        """S."""
        return int(self.engine.num_stages)

    @property
    def replica(self) -> int:
        """This rank's number among the replicas of its stage."""
        return int(self.engine.grid.get_data_parallel_id())

    def rank_of(self, stage: int) -> int:
        """The rank that has the same place in another stage."""
        return int(self.engine.grid.stage_to_global(stage_id=stage))

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """All ranks of a stage, ascending."""
        return tuple(self.engine.module._topo.get_axis_list(axis="pipe", idx=stage))

    @property
    def topology(self) -> Any:
        """How DeepSpeed orders ranks by stage and replica."""
        return self.engine.module._topo

    @property
    def sizes(self) -> dict[str, int]:
        """How many there are along each axis of the topology."""
        return {axis: int(self.topology.get_dim(axis)) for axis in self.topology.get_axis_names()}

    def replica_at(self, sizes: Mapping[str, int], rank: int) -> int:
        """Which replica a rank is in a pipeline of another size with the same axes.

        Args:
            sizes: as there.
            rank: there.
        """
        return int(resized(self.topology, sizes).get_coord(rank).data)

    def whole_backwards(self) -> dict[int, tuple[str, ...]]:
        """Why backwards run whole that an order splits, by stage; collective over all ranks."""
        everyone = gather((self.stage_id, self.in_flight.whole_because))
        told = sorted({(stage, reason) for stage, reasons in everyone for reason in reasons})
        return {stage: tuple(reason for s, reason in told if s == stage) for stage, _ in told}

    # -- its optimizer ------------------------------------------------------------------------

    @property
    def has_optimizer(self) -> bool:
        """Whether there is one; it may be made by ``initialize`` or later."""
        return self.engine.optimizer is not None

    @property
    def placeholders(self) -> list[nn.Parameter]:
        """Parameters that stand in groups of which this stage has none."""
        return [] if self._groups is None else self._groups.placeholders

    @property
    def gradient_dtype(self) -> torch.dtype:
        """What gradients are summed in between micro-batches."""
        dtype: torch.dtype = self.engine.get_data_types()[1]
        return dtype

    @property
    def clips_at(self) -> float:
        """Norm that gradients are clipped at; 0: they are not."""
        return float(self.engine.gradient_clipping())

    def make_stage_optimizer(self) -> StageOptimizer:
        """What moves the optimizer's state; collective over all ranks.

        Raises:
            ValueError: on every rank, if it is of a kind whose state can't be moved.
        """
        assert self._groups is not None, "DeepSpeed asks for the optimizer by _configure_optimizer"
        return stage_optimizer(self.engine, self._groups)

    def configure_optimizer(
        self, client: Any, parameters: Iterable[Any], configure: Callable[[Any, list[Any]], None]
    ) -> None:
        """Make the optimizer, with the same parameter groups on every rank; collective over all ranks.

        Args:
            client: the user's optimizer, a callable that makes one, or ``None``.
            parameters: parameters or groups that the user gave.
            configure: DeepSpeed's own way on.
        """
        engine, given = self.engine, add_copies(self._tied_copies, client, list(parameters))
        basic = together(lambda: self._basic_optimizer(client, given), self.device, ValueError)
        agree_on_groups(basic)
        check_scheduler(engine.client_lr_scheduler, len(basic.param_groups))
        is_flat = engine.zero_optimization() or engine.bfloat16_enabled()
        twins = owned_groups.add_twins(basic, engine.module.twinned) if is_flat and engine.module.owned else None
        self._groups = ParameterGroups(basic, device=self.device, dtype=engine.get_data_types()[0], twins=twins)
        self._groups.install(trainable_only=is_flat)
        self.name_parameters()
        configure(basic, given)

    def _basic_optimizer(self, client: Any, parameters: list[Any]) -> torch.optim.Optimizer:
        if isinstance(client, torch.optim.Optimizer):
            return client
        make = self.engine._configure_basic_optimizer if client is None else client
        optimizer: torch.optim.Optimizer = make(parameters or [{"params": []}])
        return optimizer

    # What single replicas own has parameter groups of its own; see twins.py.

    @property
    def _twins(self) -> owned_groups.Twins:
        return {} if self._groups is None else self._groups.twins

    @property
    def twinned(self) -> list[int]:
        """Indices of the user's parameter groups that have a twin."""
        return sorted(set(self._twins.values()))

    def twins_hidden(self) -> AbstractContextManager[None]:
        """Let a scheduler that is made within see the user's parameter groups alone."""
        return nullcontext() if not self._twins else owned_groups.twins_hidden(self._basic, self._twins)

    def show_users_groups(self, scheduler: Any) -> None:
        """Let a scheduler go on seeing them alone."""
        if self._twins:
            owned_groups.show_users_groups(scheduler, self._basic, self._twins)

    @property
    def _basic(self) -> torch.optim.Optimizer:
        assert self._groups is not None
        return self._groups.optimizer

    def _apart(self) -> owned_groups.Twins:
        return self._twins if self.engine.module.replica.count > 1 else {}

    def twins_apart(self) -> AbstractContextManager[None]:
        """Let an optimizer that is wrapped within share out no parameters that single replicas own."""
        return owned_groups.kept_apart(self._apart(), self.engine.module._grid.slice_proc_group)

    def leave_out_of_sums(self, wrapper: Any) -> None:
        """Let an optimizer that was wrapped so add up no such gradients."""
        owned_groups.leave_out_of_sums(wrapper, self._apart())

    def name_parameters(self) -> None:
        """Renew the table of parameter names that DeepSpeed's optimizers and checkpoints use."""
        self.engine.param_names = {parameter: name for name, parameter in self.engine.module.named_parameters()}
        for i, placeholder in enumerate(self.placeholders):
            self.engine.param_names[placeholder] = f"placeholder.{i}"

    def name_of(self, parameter: nn.Parameter) -> str:
        """What DeepSpeed calls a parameter of this stage."""
        return str(self.engine.param_names[parameter])

    def clip_gradients(self) -> None:
        """Clip by one norm over all stages (DeepSpeed's counts the first stage only)."""
        assert self._norm is not None
        parameters = list(self.engine.module.parameters())
        gradients = ((p, p.grad) for p in parameters if p.grad is not None)
        self.engine._global_grad_norm = self._norm(sums_of_squares(gradients))
        clip_gradients(parameters, self.engine._global_grad_norm, self.clips_at)

    def as_trained(self, layer: nn.Module) -> nn.Module:
        """A layer that was just built, on the device and in the precision in which DeepSpeed trains."""
        dtype = torch.bfloat16 if self.engine.bfloat16_enabled() else torch.float16
        is_low = self.engine.bfloat16_enabled() or self.engine.fp16_enabled()
        return layer.to(device=self.device, dtype=dtype) if is_low else layer.to(self.device)

    # -- what it caches -----------------------------------------------------------------------

    def begin_batch(self) -> None:
        """Let what crosses a boundary be announced anew, and remember what a batch that fails must leave as it was."""
        self.engine.reset_activation_shape()
        self._before = self.micro_batch_counters(), random_streams()

    def forget_layers(self) -> None:
        """Renew what DeepSpeed caches about the layers of a stage."""
        assert self._norm is not None
        self.engine.reset_activation_shape()
        for buffers in self.engine.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)
        self.in_flight.forget_layers()
        self.owned.forget_layers()
        self._norm.install(self.engine.optimizer)

    def forget_batch(self) -> None:
        """Leave counters and random streams as before the batch; the micro-batches that it has read stay read."""
        counters, streams = self._before
        self.set_micro_batch_counters(counters)
        set_random_streams(streams)
        self.in_flight.forget_layers()  # what raised in a half may have been no matter of halves
        self.owned.drop()

    def drop_batch(self) -> None:
        """Let the next batch, or a move, begin as if the one that was refused had not been there."""
        self.forget_batch()
        timer = self.engine.timers(TRAIN_BATCH_TIMER)
        if getattr(timer, "started_", False):  # a client's own train_batch need not use it
            timer.stop()
        if self.has_optimizer:
            self.engine.optimizer.zero_grad()

    # -- its micro-batches ----------------------------------------------------------------------

    @property
    def num_micro_batches(self) -> int:
        """M, of a batch."""
        return int(self.engine.micro_batches)

    @property
    def micro_batch_size(self) -> int:
        """Samples of a micro-batch."""
        return int(self.engine.micro_batch_size)

    def check_micro_batches(self, num_micro_batches: int) -> None:
        """Refuse a number of micro-batches that can't be.

        Args:
            num_micro_batches: M.

        Raises:
            ValueError: if it does not part the batch evenly, or the data can't be cut.
        """
        num_samples = self.num_micro_batches * self.micro_batch_size
        if num_micro_batches < 1 or num_samples % num_micro_batches:
            raise ValueError(
                f"num_micro_batches = {num_micro_batches}: must part the {num_samples} samples of a batch on each "
                f"replica evenly; give one of their divisors"
            )
        if self.reading.is_here and num_micro_batches != self.num_micro_batches:
            self.reading.slicing.check()

    def set_micro_batches(self, num_micro_batches: int, size: int | None = None) -> None:
        """Run the next batches in another number of micro-batches.

        DeepSpeed divides the loss by it, and the rest follows: buffers are as many as the order needs, and each batch
        announces anew what crosses a boundary.

        Args:
            num_micro_batches: M, checked.
            size: samples of each; ``None``: as many in all as now.
        """
        engine = self.engine
        size = self.num_micro_batches * self.micro_batch_size // num_micro_batches if size is None else size
        engine._config.gradient_accumulation_steps = engine.micro_batches = num_micro_batches
        engine._config.train_micro_batch_size_per_gpu = engine.micro_batch_size = size
        if hasattr(engine.optimizer, "gradient_accumulation_steps"):  # ZeRO keeps a number of its own
            engine.optimizer.gradient_accumulation_steps = num_micro_batches
        self._order, self._traffic = None, None

    def micro_batch_counters(self) -> dict[str, int]:
        """What seeds and accumulation follow from, by name."""
        return {"micro_offset": int(self.engine.module.micro_offset), "micro_steps": int(self.engine.micro_steps)}

    def note_counters(self, batch: int) -> None:
        """Remember with which counters a batch begins.

        Args:
            batch: its number; all before it is done.
        """
        self.reading.kept.counters[batch] = self.micro_batch_counters()

    def take_counters(self, batch: int) -> None:
        """Let a batch that is repeated begin with the counters that it had, if they are known."""
        if batch in self.reading.kept.counters:
            self.set_micro_batch_counters(self.reading.kept.counters[batch])

    def set_micro_batch_counters(self, counters: Mapping[str, int]) -> None:
        """Go on from what :meth:`micro_batch_counters` gave; more is left alone."""
        self.engine.module.micro_offset = counters["micro_offset"]
        self.engine.micro_steps = counters["micro_steps"]

    @contextmanager
    def counting_as_dealt(self) -> Iterator[None]:
        """Let the micro-batches of a training batch be counted, and seeded, as on the replicas that they are of."""
        module = self.engine.module
        base = int(module.micro_offset)
        # It is raised before a micro-batch runs.
        module.offsets = offsets = self.reading.offsets(base + 1)
        try:
            yield
        finally:
            module.offsets = {}
        if offsets:
            module.micro_offset = max(offsets.values())

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far."""
        return int(self.engine.global_steps)

    @property
    def num_samples(self) -> int:
        """Samples trained so far."""
        return int(self.engine.global_samples)

    @property
    def samples_a_batch(self) -> int:
        """Samples that a batch has, over all micro-batches and replicas."""
        return int(self.engine.train_batch_size())

    def run_batch(self) -> torch.Tensor:
        """Train a batch as DeepSpeed does, on what is kept or on the present iterator's micro-batches.

        Returns:
            Its mean loss.
        """
        loss: torch.Tensor = PipelineEngine.train_batch(self.engine)
        return loss
