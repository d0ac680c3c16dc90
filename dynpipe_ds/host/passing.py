"""Sending activations and gradients between neighbouring stages, and dropping together a batch that some rank can't do.

Where a part of a micro-batch raises, or can't be sent on, the rank gives the batch up: it computes nothing more of it,
but sends and takes every message that its order has, so that nobody waits for it and nothing is left under way. Its
messages say so, and whoever takes one does likewise. Before the optimizer's step all ranks raise the same error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.measure.recorder import STEP, TRANSFER
from dynpipe_ds.messages.channels import Channels
from dynpipe_ds.messages.crossing import Awaited, Crossing, Links, Passage, Told
from dynpipe_ds.messages.layouts import Layout, same_memory
from dynpipe_ds.messages.obstacles import cant_leave
from dynpipe_ds.messages.values import CantCross, put_together, take_apart, tensors_in
from dynpipe_ds.ranks.agreement import anywhere, disagreement, first_error
from dynpipe_ds.ranks.fatal import FatalError
from dynpipe_ds.schedule import Op


class BatchRefused(ValueError):
    """Raised on every rank, with the same text, where some rank could not do its part of a batch.

    Training can go on with another one. Where something raised, that is the cause on its rank.
    """


class _LeftOut:
    """Stands for the inputs and outputs of a micro-batch that was not computed, here or on an earlier stage."""


LEFT_OUT = _LeftOut()


def links_of(engine: Any) -> Links:
    """What is told once a batch; kept where DeepSpeed's ``reset_activation_shape`` forgets it.

    Args:
        engine: of this stage.
    """
    if engine.meta_buffer is None:
        engine.meta_buffer = Links()
    links: Links = engine.meta_buffer
    return links


def _channels(engine: Any) -> Channels:
    channels: Channels = engine.dynamic.pipeline.channels
    return channels


# -- activations ------------------------------------------------------------------------------


def send_activations(engine: Any, buffer_id: int) -> None:
    """Send a micro-batch's outputs to the next stage, preceded once a batch by what they are; over at once."""
    links, channels, stage = links_of(engine), _channels(engine), engine.next_stage
    message = channels.turn(Op.SEND_ACTIVATION)
    is_told = links.tells(links.outputs)
    crossing, tensors = _taken_apart(engine, buffer_id, is_told)
    if is_told:
        links.outputs = crossing
    told = links.outputs
    if told is not None and not is_told and not (crossing is not None and told.covers(crossing)):
        if crossing is not None:
            give_up(engine, links.difference(f"what stage {engine.stage_id} puts out", told, crossing))
        tensors = told.zeros(engine.device)
    channels.out[stage].send(message, Told(told) if is_told else None, tensors)
    passage = Passage() if told is None else Passage(told.wanting(tensors), is_told)
    links.sent[buffer_id] = passage
    links.awaited[message.micro_batch] = Awaited(bool(passage.wanting), passage.is_told)
    channels.into[stage].post_ahead()  # its gradient can come back from now on


def _taken_apart(engine: Any, buffer_id: int, is_told: bool) -> tuple[Crossing | None, list[Tensor]]:
    """What a micro-batch's outputs are; nothing if they can't be sent."""
    outputs = engine.pipe_buffers["outputs"][buffer_id]
    if outputs is LEFT_OUT:
        return None, []
    try:
        return Crossing.of(outputs, may_want=is_told and _has_anything_to_train(engine, buffer_id))
    except CantCross as error:
        module = engine.module
        text = cant_leave(str(error), stage=module.stage_id, boundaries=module.boundaries, names=module.layer_names())
        give_up(engine, ValueError(text))
        return None, []


def _has_anything_to_train(engine: Any, buffer_id: int) -> bool:
    if not torch.is_grad_enabled():
        return False
    passage = links_of(engine).received.get(buffer_id, Passage())
    return bool(passage.wanting) or any(parameter.requires_grad for parameter in engine.module.parameters())


def receive_activations(engine: Any, buffer_id: int) -> None:
    """Wait for a micro-batch's inputs from the previous stage."""
    links, channels, stage = links_of(engine), _channels(engine), engine.prev_stage
    told, is_told, received = channels.into[stage].take(channels.turn(Op.RECV_ACTIVATION))
    inputs = engine.pipe_buffers["inputs"]
    if told is None:
        inputs[buffer_id], links.received[buffer_id] = LEFT_OUT, Passage()
        return
    for tensor, wants_gradient in zip(received, told.flags, strict=True):
        tensor.requires_grad_(wants_gradient)
    links.received[buffer_id] = Passage(told.wanting(received), is_told)
    try:
        inputs[buffer_id] = told.pack(received)
    except LookupError as error:
        text = f"what stage {stage} puts out can't be put together on stage {engine.stage_id}: {error}"
        give_up(engine, ValueError(text))


class _HandOver(torch.autograd.Function):
    """Gives received tensors to the layers, and takes their gradients as they come.

    Autograd itself would give a leaf its gradient in the leaf's own layout, and would not let layers change it.
    """

    leaves_gradients_alone = True  # so that a backward in two halves need not copy what came before

    @staticmethod
    def forward(ctx: Any, *received: Tensor) -> tuple[Tensor, ...]:
        ctx.received = received
        ctx.set_materialize_grads(False)
        return tuple(same_memory(tensor) for tensor in received)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        for tensor, gradient in zip(ctx.received, gradients, strict=True):
            tensor.grad = gradient
        return (None,) * len(gradients)


class HandedOver:
    """Stands for received inputs where DeepSpeed copies what the layers get: a copy would lie otherwise.

    Args:
        inputs: received.
    """

    def __init__(self, inputs: Any) -> None:
        self._inputs = inputs

    def clone(self) -> Any:
        """The inputs, in containers that layers may change."""
        structure, tensors = take_apart(self._inputs)
        if not torch.is_grad_enabled():  # with their flags, by which some kernels choose in evaluation, too
            return put_together(structure, tensors)
        wanting = [tensor for tensor in tensors if tensor.requires_grad]
        handed: Sequence[Tensor] = _HandOver.apply(*wanting) if wanting else ()  # type: ignore[no-untyped-call]
        given = {id(received): tensor for received, tensor in zip(wanting, handed, strict=True)}
        return put_together(structure, [given.get(id(tensor), tensor) for tensor in tensors])


def with_flags(forward: Callable[..., None]) -> Callable[..., None]:
    """Let a forward pass of the user's own give layers what was received with its flags.

    A copy made under ``no_grad`` has none, and some kernels choose by them in evaluation, too.

    Args:
        forward: an instruction that is not ours, for a micro-batch's buffer.
    """

    @wraps(forward)
    def run(engine: Any, buffer_id: int, **kwargs: Any) -> None:
        received = [] if engine.is_first_stage() else tensors_in(engine.pipe_buffers["inputs"][buffer_id])

        def flag(_module: nn.Module, given: Any) -> None:
            copies = tensors_in(given)
            if torch.is_grad_enabled() or [t.shape for t in copies] != [t.shape for t in received]:
                return  # autograd's copies have flags; what is no copy is not known
            for copy, tensor in zip(copies, received, strict=True):
                copy.requires_grad_(tensor.requires_grad)

        with engine.module.register_forward_pre_hook(flag):
            forward(engine, buffer_id=buffer_id, **kwargs)

    return run


# -- gradients --------------------------------------------------------------------------------


def send_gradients(engine: Any, buffer_id: int) -> None:
    """Send the gradients of the inputs that want one to the previous stage, preceded once a batch by what they are."""
    links, channels = links_of(engine), _channels(engine)
    message = channels.turn(Op.SEND_GRADIENT)
    passage = links.received.pop(buffer_id)
    engine.pipe_buffers["inputs"][buffer_id] = None
    if not passage.wanting:
        return
    told = None if passage.is_told else links.input_gradients
    zeros = [Layout.of(tensor) for tensor in passage.wanting] if told is None else told.layouts
    gradients = [
        layout.zeros(engine.device) if tensor.grad is None else tensor.grad
        for tensor, layout in zip(passage.wanting, zeros, strict=True)
    ]
    found = Crossing.of_gradients(gradients, [tensor.grad is not None for tensor in passage.wanting])
    if told is None:
        links.input_gradients = found
    elif found.layouts != told.layouts:
        give_up(engine, links.difference(f"the gradient that stage {engine.stage_id} sends back", told, found, ""))
        gradients = [layout.zeros(engine.device) for layout in told.layouts]
    channels.out[engine.prev_stage].send(message, Told(found) if told is None else None, gradients)


def receive_gradients(engine: Any, buffer_id: int) -> None:
    """Wait for the gradients of the outputs that want one from the next stage; ``None`` where there is none."""
    engine.grad_layer = ()
    links, channels = links_of(engine), _channels(engine)
    message, into = channels.turn(Op.RECV_GRADIENT), channels.into[engine.next_stage]
    if not links.sent[buffer_id].wanting:
        into.skip(message)
        return
    told, _, received = into.take(message)
    assert told is not None, "gradients that travel have kinds"
    # What is not used in the first micro-batch of a batch may be used in another.
    engine.grad_layer = tuple(
        gradient if there_is or bool(gradient.any()) else None
        for gradient, there_is in zip(received, told.flags, strict=True)
    )


# -- giving up --------------------------------------------------------------------------------


def give_up(engine: Any, error: Exception) -> None:
    """Compute no more of this batch; :func:`refuse_together` raises on all ranks at its end.

    Args:
        engine: of this stage.
        error: why; the first one counts.

    Raises:
        Exception: the error, where there is one stage, so that nobody waits, or where all ranks end anyway.
    """
    tell_layers(engine)
    if engine.num_stages == 1 or isinstance(error, FatalError):
        raise error
    links = links_of(engine)
    if links.failure is None:
        links.failure = error
        clear_frames(error.__traceback__)  # they hold what was computed, and memory may be short
    _channels(engine).drop()


def tell_layers(engine: Any) -> None:
    """Let layers whose replicas compute something together know that this rank computes no more of the batch.

    Args:
        engine: of this stage.
    """
    for module in engine.module.modules():
        if callable(give_up_batch := getattr(module, "give_up_batch", None)):
            give_up_batch()


def has_given_up(engine: Any) -> bool:
    """Whether this rank computes no more of the batch, for a reason of its own or of another stage.

    Args:
        engine: of this stage.
    """
    return _channels(engine).is_dropped


def unless_given_up(compute: Callable[..., None]) -> Callable[..., None]:
    """Compute a part of a micro-batch unless the batch is given up; give it up where that raises.

    Args:
        compute: the instruction.
    """

    @wraps(compute)
    def run(engine: Any, buffer_id: int) -> None:
        if not has_given_up(engine):
            try:
                compute(engine, buffer_id=buffer_id)
                return
            except Exception as error:  # noqa: BLE001 - a layer may raise anything
                give_up(engine, error)
        tell_layers(engine)
        engine.pipe_buffers["outputs"][buffer_id] = LEFT_OUT
        engine.loss = None

    return run


def even_if_given_up(load: Callable[..., None]) -> Callable[..., None]:
    """Load a micro-batch; give the batch up where that raises.

    What follows is loaded all the same, so that the stages which read data stay at the same place in it.

    Args:
        load: the instruction.
    """

    @wraps(load)
    def run(engine: Any, buffer_id: int) -> None:
        try:
            load(engine, buffer_id=buffer_id)
        except Exception as error:  # noqa: BLE001 - so may data
            give_up(engine, error)

    return run


def begin(engine: Any, pipe_schedule: Any) -> None:
    """Before a schedule: all ranks have the same one, and nothing is refused yet; collective over all ranks.

    Compared each time, in one small collective: a rank that alone has another order would else wait alone.

    Args:
        engine: of this stage.
        pipe_schedule: what it is about to run.

    Raises:
        BatchRefused: on every rank, if they are to run different orders.
        UnfinishedBatchError: if an earlier schedule ended in its middle.
    """
    links, pipeline = links_of(engine), engine.dynamic.pipeline
    if engine.num_stages == 1:
        return
    pipeline.channels.check_over()
    traffic = pipeline.traffic_of(pipe_schedule)
    plan = (traffic.digest, engine.num_stages, *engine.module.boundaries)
    problem = disagreement(plan, "the order of a batch (a digest of it, stages, boundaries)", engine.device)
    if problem is not None:
        raise BatchRefused(problem)
    links.failure = None
    links.awaited.clear()
    links.is_settled = False
    links.always_told = bool(engine.dynamic_shape or not engine.module.training)
    pipeline.channels.begin(traffic, links, lambda text: give_up(engine, ValueError(text)))


def refuse_together(engine: Any) -> None:
    """Let no rank go on if some rank has given the batch up; collective over all ranks, once a schedule.

    Args:
        engine: of this stage.

    Raises:
        BatchRefused: on every rank, if some rank has.
    """
    links = links_of(engine)
    if engine.num_stages == 1 or links.is_settled:
        return
    links.is_settled = True
    _channels(engine).finish()
    message = first_error(links.failure, engine.device)
    if message is not None:
        failure, links.failure = links.failure, None
        raise BatchRefused(
            f"{message}; the batch was dropped on every rank, and training can go on"
        ) from failure


def unless_refused(step: Callable[..., None]) -> Callable[..., None]:
    """Let no rank take the optimizer's step of a batch that some rank has given up.

    Until all have said so, who is through early waits: that is no part of the step's seconds.

    Args:
        step: the instruction.
    """

    @wraps(step)
    def run(engine: Any, **kwargs: Any) -> None:
        recorder = engine.module.recorder
        if recorder is not None:
            recorder.mark_layer(TRANSFER, -1)
        refuse_together(engine)
        if recorder is not None:
            recorder.mark_layer(STEP, -1)
        step(engine, **kwargs)

    return run


def unless_replica_refuses(reduce: Callable[..., None]) -> Callable[..., None]:
    """Leave out the sum over replicas where one of them lacks gradients, since it has given the batch up.

    Args:
        reduce: the instruction.
    """

    @wraps(reduce)
    def run(engine: Any, **kwargs: Any) -> None:
        refuses = has_given_up(engine)
        if engine.num_stages > 1 and engine.is_data_parallel:
            refuses = anywhere(refuses, engine.device, engine.grid.get_data_parallel_group())
        if not refuses:
            reduce(engine, **kwargs)

    return run

