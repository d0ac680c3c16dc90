"""Sending activations and gradients between neighbouring stages, and refusing together what could not be sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.messages.crossing import FIRST_BYTES, Crossing, Links, Passage
from dynpipe_ds.messages.layouts import Layout, same_memory
from dynpipe_ds.messages.obstacles import cant_leave
from dynpipe_ds.messages.values import CantCross, put_together, take_apart, tensors_in
from dynpipe_ds.migration.transport import exchange, exchange_bytes
from dynpipe_ds.ranks.agreement import anywhere, first_error


class BatchRefused(ValueError):
    """Raised on every rank, with the same text, where a micro-batch could not cross a boundary."""


class _LeftOut:
    """Stands for the inputs and outputs of a micro-batch that could not be sent on by an earlier stage."""


LEFT_OUT = _LeftOut()
_NOTHING = b"null"


def links_of(engine: Any) -> Links:
    """What is told once a batch; kept where DeepSpeed's ``reset_activation_shape`` forgets it.

    Args:
        engine: of this stage.
    """
    if engine.meta_buffer is None:
        engine.meta_buffer = Links()
    links: Links = engine.meta_buffer
    return links


# -- activations ------------------------------------------------------------------------------


def send_activations(engine: Any, buffer_id: int) -> None:
    """Send a micro-batch's outputs to the next stage, preceded once a batch by what they are."""
    links, stage = links_of(engine), engine.next_stage
    is_told = _is_told(engine, links.outputs)
    crossing, tensors = _taken_apart(engine, buffer_id, is_told)
    if is_told:
        links.outputs = crossing
        _tell(engine, crossing, stage)
    told = links.outputs
    if told is None:
        links.sent[buffer_id] = Passage()
        return
    if not is_told and not (crossing is not None and told.covers(crossing)):
        if crossing is not None:
            links.refuse(f"what stage {engine.stage_id} puts out", told, crossing)
        tensors = told.zeros(engine.device)
    _send(engine, tensors, stage)
    links.sent[buffer_id] = Passage(told.wanting(tensors), is_told)


def _taken_apart(engine: Any, buffer_id: int, is_told: bool) -> tuple[Crossing | None, list[Tensor]]:
    """What a micro-batch's outputs are; nothing if they can't be sent."""
    outputs = engine.pipe_buffers["outputs"][buffer_id]
    if outputs is LEFT_OUT:
        return None, []
    try:
        return Crossing.of(outputs, may_want=is_told and _has_anything_to_train(engine, buffer_id))
    except CantCross as error:
        module = engine.module
        links_of(engine).refusals.append(cant_leave(
            str(error), stage=module.stage_id, boundaries=module.boundaries, names=module.layer_names()
        ))
        return None, []


def _has_anything_to_train(engine: Any, buffer_id: int) -> bool:
    if not torch.is_grad_enabled():
        return False
    passage = links_of(engine).received.get(buffer_id, Passage())
    return bool(passage.wanting) or any(parameter.requires_grad for parameter in engine.module.parameters())


def receive_activations(engine: Any, buffer_id: int) -> None:
    """Receive a micro-batch's inputs from the previous stage."""
    links, stage = links_of(engine), engine.prev_stage
    is_told = _is_told(engine, links.inputs)
    if is_told:
        links.inputs = _hear(engine, stage)
    told, inputs = links.inputs, engine.pipe_buffers["inputs"]
    if told is None:
        inputs[buffer_id], links.received[buffer_id] = LEFT_OUT, Passage()
        return
    received = _receive(engine, told.layouts, stage)
    for tensor, wants_gradient in zip(received, told.flags, strict=True):
        tensor.requires_grad_(wants_gradient)
    links.received[buffer_id] = Passage(told.wanting(received), is_told)
    try:
        inputs[buffer_id] = told.pack(received)
    except LookupError as error:
        links.refusals.append(f"what stage {stage} puts out can't be put together on stage {engine.stage_id}: {error}")
        inputs[buffer_id] = LEFT_OUT


def unless_left_out(forward: Callable[..., None]) -> Callable[..., None]:
    """Run a forward pass unless there is nothing to run it on.

    Args:
        forward: the instruction.
    """

    @wraps(forward)
    def run(engine: Any, buffer_id: int) -> None:
        if engine.pipe_buffers["inputs"][buffer_id] is LEFT_OUT:
            engine.pipe_buffers["outputs"][buffer_id] = LEFT_OUT
            engine.loss = None
            links_of(engine).has_left_out = True
        else:
            forward(engine, buffer_id=buffer_id)

    return run


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
    links = links_of(engine)
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
        _tell(engine, found, engine.prev_stage)
    elif found.layouts != told.layouts:
        links.refuse(f"the gradient that stage {engine.stage_id} sends back", told, found, "")
        gradients = [layout.zeros(engine.device) for layout in told.layouts]
    _send(engine, gradients, engine.prev_stage)


def receive_gradients(engine: Any, buffer_id: int) -> None:
    """Receive the gradients of the outputs that want one from the next stage; ``None`` where there is none."""
    engine.grad_layer = ()
    links = links_of(engine)
    passage = links.sent[buffer_id]
    if not passage.wanting:
        return
    if passage.is_told:
        links.output_gradients = _hear(engine, engine.next_stage)
    told = links.output_gradients
    assert told is not None, "the first micro-batch of a batch that wants gradients is told about"
    received = _receive(engine, told.layouts, engine.next_stage)
    # What is not used in the first micro-batch of a batch may be used in another.
    engine.grad_layer = tuple(
        gradient if there_is or bool(gradient.any()) else None
        for gradient, there_is in zip(received, told.flags, strict=True)
    )


# -- messages ---------------------------------------------------------------------------------


def _is_told(engine: Any, last: Crossing | None) -> bool:
    """Whether the next micro-batch is told about. In evaluation it is: no step follows before which to refuse one."""
    return last is None or last.again or bool(engine.dynamic_shape or not engine.module.training)


def _tell(engine: Any, crossing: Crossing | None, stage: int) -> None:
    text = _NOTHING if crossing is None else crossing.encode()
    exchange_bytes({engine.grid.stage_to_global(stage_id=stage): text}, [], engine.device, first_bytes=FIRST_BYTES)


def _hear(engine: Any, stage: int) -> Crossing | None:
    rank = engine.grid.stage_to_global(stage_id=stage)
    text = exchange_bytes({}, [rank], engine.device, first_bytes=FIRST_BYTES)[rank]
    return None if text == _NOTHING else Crossing.decode(text)


def _send(engine: Any, tensors: Sequence[Tensor], stage: int) -> None:
    """Send tensors to a neighbour, all at once: one after the other, each waits to be asked for."""
    messages = [Layout.of(tensor).message(tensor) for tensor in tensors if tensor.numel()]
    exchange({engine.grid.stage_to_global(stage_id=stage): messages}, {})


def _receive(engine: Any, layouts: Sequence[Layout], stage: int) -> list[Tensor]:
    """New tensors with what a neighbour sends at once."""
    tensors = [layout.empty(engine.device) for layout in layouts]
    messages = [layout.message(tensor) for layout, tensor in zip(layouts, tensors, strict=True)]
    exchange({}, {engine.grid.stage_to_global(stage_id=stage): [message for message in messages if message.numel()]})
    for layout, tensor, message in zip(layouts, tensors, messages, strict=True):
        layout.unpack(message, tensor)
    return tensors


# -- refusing ---------------------------------------------------------------------------------


def begin(engine: Any) -> None:
    """Before a schedule: nothing is refused yet.

    Args:
        engine: of this stage.
    """
    links = links_of(engine)
    links.refusals.clear()
    links.is_settled = links.has_left_out = False


def refuse_together(engine: Any) -> None:
    """Let no rank go on if a micro-batch could not cross a boundary; collective over all ranks, once a schedule.

    Args:
        engine: of this stage.

    Raises:
        BatchRefused: on every rank, if some rank had to refuse one.
    """
    links = links_of(engine)
    if engine.num_stages == 1 or links.is_settled:
        return
    links.is_settled = True
    message = first_error(ValueError(links.refusals[0]) if links.refusals else None, engine.device)
    if message is not None:
        raise BatchRefused(message)


def unless_refused(step: Callable[..., None]) -> Callable[..., None]:
    """Let no rank take the optimizer's step of a batch of which a micro-batch could not cross a boundary.

    Args:
        step: the instruction.
    """

    @wraps(step)
    def run(engine: Any, **kwargs: Any) -> None:
        refuse_together(engine)
        step(engine, **kwargs)

    return run


def unless_replica_refuses(reduce: Callable[..., None]) -> Callable[..., None]:
    """Leave out the sum over replicas where one of them lacks gradients, since it left out a micro-batch.

    Args:
        reduce: the instruction.
    """

    @wraps(reduce)
    def run(engine: Any, **kwargs: Any) -> None:
        links = links_of(engine)
        refuses = links.has_left_out or bool(links.refusals)
        if engine.num_stages > 1 and engine.is_data_parallel:
            refuses = anywhere(refuses, engine.device, engine.grid.get_data_parallel_group())
        if not refuses:
            reduce(engine, **kwargs)

    return run

