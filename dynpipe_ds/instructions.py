"""Pipeline instructions that do not depend on where the model is cut.

They replace DeepSpeed's when ``dynamic_pipeline`` is enabled:

* each tensor that crosses a boundary says whether it wants a gradient back, so that a frozen prefix of
  the model does no backward and sends none;
* what is received, activations and gradients, lies in memory as it did where it came from, since kernels choose
  by layout; it has a dtype of its own (DeepSpeed's buffers are reused regardless of it), and is not copied again;
* the tensors between two stages travel together, not one after the other;
* several outputs go through one backward, not one each: the sums are then those of the undivided model;
* gradients of tied layers are added in layer order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from dynpipe_ds import profiling
from dynpipe_ds.agreement import first_error
from dynpipe_ds.crossing import META_SIZE, Crossing, Links, Tensors, as_tuple, distinct
from dynpipe_ds.layouts import Layout, same_memory
from dynpipe_ds.migration.transport import exchange


def _links(engine: Any) -> Links:
    """What is told once a batch; kept where DeepSpeed's ``reset_activation_shape`` forgets it."""
    if engine.meta_buffer is None:
        engine.meta_buffer = Links()
    links: Links = engine.meta_buffer
    return links


def _tells_each(engine: Any) -> bool:
    """Whether every micro-batch is announced. In evaluation it is: no step follows before which to refuse one."""
    return bool(engine.dynamic_shape or not engine.module.training)


def _tell(engine: Any, crossing: Crossing, stage: int) -> Crossing:
    numbers = crossing.encode()
    meta = torch.tensor(numbers + [0] * (META_SIZE - len(numbers)), dtype=torch.int64)
    exchange({engine.grid.stage_to_global(stage_id=stage): [meta.to(engine.device)]}, {})
    return crossing


def _hear(engine: Any, stage: int) -> Crossing:
    meta = torch.empty(META_SIZE, dtype=torch.int64, device=engine.device)
    exchange({}, {engine.grid.stage_to_global(stage_id=stage): [meta]})
    return Crossing.decode(meta.tolist())


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


def _wanting(value: Tensors) -> list[Tensor]:
    """The tensors that want a gradient, each once."""
    return [tensor for tensor in distinct(as_tuple(value)) if tensor.requires_grad]


def send_activations(engine: Any, buffer_id: int) -> None:
    """Send a micro-batch's outputs to the next stage, preceded once a batch by what they are."""
    links, outputs = _links(engine), engine.pipe_buffers["outputs"][buffer_id]
    crossing = Crossing.of(outputs)
    if links.outputs is None or _tells_each(engine):
        links.outputs = _tell(engine, crossing, engine.next_stage)
    elif crossing != links.outputs:
        what = f"what stage {engine.stage_id} puts out"
        links.refuse(what, links.outputs, crossing, " that wants a gradient")
        outputs = engine.pipe_buffers["outputs"][buffer_id] = links.outputs.stand_in(engine.device)
    _send(engine, distinct(as_tuple(outputs)), engine.next_stage)


def receive_activations(engine: Any, buffer_id: int) -> None:
    """Receive a micro-batch's inputs from the previous stage."""
    links = _links(engine)
    if links.inputs is None or _tells_each(engine):
        links.inputs = _hear(engine, engine.prev_stage)
    received = _receive(engine, links.inputs.layouts, engine.prev_stage)
    for tensor, wants_gradient in zip(received, links.inputs.flags, strict=True):
        tensor.requires_grad_(wants_gradient)
    engine.pipe_buffers["inputs"][buffer_id] = links.inputs.pack(received)


class _HandOver(torch.autograd.Function):
    """Gives received tensors to the layers, and takes their gradients as they come.

    Autograd itself would give a leaf its gradient in the leaf's own layout, and would not let layers change it.
    """

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


class _HandedOver:
    """Stands for received inputs where DeepSpeed copies what the layers get: a copy would lie otherwise."""

    def __init__(self, inputs: Tensors) -> None:
        self._inputs = inputs

    def clone(self) -> Tensors:
        wanting = _wanting(self._inputs)
        handed: Sequence[Tensor] = _HandOver.apply(*wanting) if wanting else ()  # type: ignore[no-untyped-call]
        given = {id(received): tensor for received, tensor in zip(wanting, handed, strict=True)}
        if isinstance(self._inputs, tuple):
            return tuple(given.get(id(tensor), tensor) for tensor in self._inputs)
        return given.get(id(self._inputs), self._inputs)


def forward_pass(engine: Any, buffer_id: int) -> None:
    """Forward of a micro-batch through this stage, as DeepSpeed's, but on what was received itself."""
    inputs = engine.pipe_buffers["inputs"]
    received = inputs[buffer_id]
    if not engine.is_first_stage():
        inputs[buffer_id] = _HandedOver(received)
    PipelineEngine._exec_forward_pass(engine, buffer_id)
    inputs[buffer_id] = received


def send_gradients(engine: Any, buffer_id: int) -> None:
    """Send the gradients of the inputs that want one to the previous stage, preceded once a batch by what they are."""
    wanting = _wanting(engine.pipe_buffers["inputs"][buffer_id])
    engine.pipe_buffers["inputs"][buffer_id] = None
    if not wanting:
        return
    links = _links(engine)
    told = None if _tells_each(engine) else links.input_gradients
    zeros = [Layout.of(tensor) for tensor in wanting] if told is None else told.layouts
    gradients = [
        layout.zeros(engine.device) if tensor.grad is None else tensor.grad
        for tensor, layout in zip(wanting, zeros, strict=True)
    ]
    found = Crossing.of_gradients(gradients, [tensor.grad is not None for tensor in wanting])
    if told is None:
        links.input_gradients = _tell(engine, found, engine.prev_stage)
    elif found.layouts != told.layouts:
        links.refuse(f"the gradient that stage {engine.stage_id} sends back", told, found)
        gradients = [layout.zeros(engine.device) for layout in told.layouts]
    _send(engine, gradients, engine.prev_stage)


def receive_gradients(engine: Any, buffer_id: int) -> None:
    """Receive the gradients of the outputs that want one from the next stage; ``None`` where there is none."""
    engine.grad_layer = ()
    if not _wanting(engine.pipe_buffers["outputs"][buffer_id]):
        return
    links = _links(engine)
    if links.output_gradients is None or _tells_each(engine):
        links.output_gradients = _hear(engine, engine.next_stage)
    told = links.output_gradients
    received = _receive(engine, told.layouts, engine.next_stage)
    # What is not used in the first micro-batch of a batch may be used in another.
    engine.grad_layer = tuple(
        gradient if there_is or bool(gradient.any()) else None
        for gradient, there_is in zip(received, told.flags, strict=True)
    )


def _wants_backward(engine: Any, buffer_id: int) -> bool:
    if engine.is_last_stage():
        return bool(engine.loss.requires_grad)
    return bool(_wanting(engine.pipe_buffers["outputs"][buffer_id]))


def backward_pass(engine: Any, buffer_id: int) -> None:
    """Backward of a micro-batch through this stage; nothing where all of it is frozen."""
    if engine.is_last_stage():
        if _wants_backward(engine, buffer_id):
            PipelineEngine._exec_backward_pass(engine, buffer_id)
        return
    outputs = _wanting(engine.pipe_buffers["outputs"][buffer_id])
    gradients = {i: gradient for i, gradient in enumerate(engine.grad_layer) if gradient is not None}
    if gradients:
        if engine.using_bf16_optimizer:
            engine.optimizer.clear_lp_grads()
        engine._running_engine_backward = True
        try:
            torch.autograd.backward([outputs[i] for i in gradients], list(gradients.values()))
        finally:
            engine._running_engine_backward = False
        if engine.using_bf16_optimizer and not engine._config.bfloat16_config.immediate_grad_update:
            engine.optimizer.update_hp_grads(clear_lp_grads=False)
    engine.pipe_buffers["output_tensors"][buffer_id] = None
    engine.pipe_buffers["outputs"][buffer_id] = None
    engine.grad_layer = None


def _refuse_together(step: Callable[..., None]) -> Callable[..., None]:
    """Let no rank take the optimizer's step of a batch of which a micro-batch could not cross a boundary.

    Args:
        step: the instruction.
    """

    @wraps(step)
    def run(engine: Any, **kwargs: Any) -> None:
        if engine.num_stages > 1 and engine.micro_batches > 1 and not _tells_each(engine):
            refusals = _links(engine).refusals
            message = first_error(ValueError(refusals[0]) if refusals else None, engine.device)
            if message is not None:
                raise ValueError(message)
        step(engine, **kwargs)

    return run


def load_micro_batch(engine: Any, buffer_id: int) -> None:
    """Load a micro-batch as DeepSpeed does, without asking for gradients of the data."""
    PipelineEngine._exec_load_micro_batch(engine, buffer_id)
    if engine.is_first_stage():
        for tensor in as_tuple(engine.pipe_buffers["inputs"][buffer_id]):
            tensor.requires_grad_(False)


def reduce_tied_gradients(engine: Any) -> None:
    """Give every copy of a tied weight the sum of all copies' gradients, added in layer order.

    Raises:
        ValueError: on every rank that holds the key, if only some of its copies are frozen.
    """
    module = engine.module
    for key, layers in module.tied_layers().items():
        owners = [module.stage_owner(layer) for layer in layers]
        if engine.stage_id not in owners:
            continue
        mine = [layer for layer in layers if layer in module.local_layers()]
        partners = sorted(set(owners) - {engine.stage_id})
        trainable = torch.tensor(
            [float(w.requires_grad) for layer in mine for w in module.tied_weights(layer)],
            device=engine.device,
        )
        flags = _swap(engine, trainable.mean().view(1), dict.fromkeys(partners, 1))
        if any(bool(flag != trainable[0]) for flag in (trainable.mean(), *flags.values())):
            raise ValueError(
                f"tied layers {layers} (key {key!r}) are frozen in one place and trained in another; "
                "freeze or unfreeze all of them together"
            )
        if trainable[0]:
            for i in range(len(module.tied_weights(mine[0]))):
                _add_copies(engine, {layer: module.tied_weights(layer)[i] for layer in mine}, layers, owners)


def _add_copies(engine: Any, weights: dict[int, Any], layers: list[int], owners: list[int]) -> None:
    gradients = {}
    for layer, weight in weights.items():
        gradient = engine.stage_optimizer.gradient(weight)
        if gradient is None:
            weight.grad = gradient = torch.zeros_like(weight)
        gradients[layer] = gradient
    own = torch.stack([g.detach().flatten() for g in gradients.values()])
    counts = {s: owners.count(s) for s in set(owners) - {engine.stage_id}}
    theirs = _swap(engine, own.flatten(), {s: n * own.shape[1] for s, n in counts.items()})
    rows = {engine.stage_id: iter(own)} | {s: iter(t.view(-1, own.shape[1])) for s, t in theirs.items()}
    total = None
    for owner in owners:
        row = next(rows[owner])
        total = row.clone() if total is None else total.add_(row)
    assert total is not None
    for gradient in gradients.values():
        gradient.copy_(total.view_as(gradient))


def _swap(engine: Any, tensor: Tensor, sizes: dict[int, int]) -> dict[int, Tensor]:
    """Send a tensor to each of some stages and get one of the given size from each."""
    rank_of = engine.grid.stage_to_global
    received = {s: tensor.new_empty(size) for s, size in sizes.items()}
    exchange(
        {rank_of(stage_id=s): [tensor.contiguous()] for s in sizes},
        {rank_of(stage_id=s): [t] for s, t in received.items()},
    )
    return received


def _timed(kind: int, function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def run(engine: Any, **kwargs: Any) -> None:
        recorder, module = engine.module.recorder, engine.module
        if recorder is not None:
            layers = module.local_indices()
            edge = -1 if not layers else layers[-1] if kind == profiling.BACKWARD else layers[0]
            idle = kind == profiling.BACKWARD and not _wants_backward(engine, kwargs["buffer_id"])
            recorder.instruction(profiling.TRANSFER if idle else kind, edge)
        function(engine, **kwargs)

    return run


_OURS: dict[type, tuple[int, Callable[..., None]]] = {
    schedule.LoadMicroBatch: (profiling.LOAD, load_micro_batch),
    schedule.ForwardPass: (profiling.FORWARD, forward_pass),
    schedule.BackwardPass: (profiling.BACKWARD, backward_pass),
    schedule.SendActivation: (profiling.TRANSFER, send_activations),
    schedule.RecvActivation: (profiling.TRANSFER, receive_activations),
    schedule.SendGrad: (profiling.TRANSFER, send_gradients),
    schedule.RecvGrad: (profiling.TRANSFER, receive_gradients),
    schedule.ReduceTiedGrads: (profiling.REDUCE, reduce_tied_gradients),
    schedule.ReduceGrads: (profiling.REDUCE, PipelineEngine._exec_reduce_grads),
    schedule.OptimizerStep: (profiling.STEP, PipelineEngine._exec_optimizer_step),
}

# Where nothing but the measuring is ours, a client's own function can stand in for DeepSpeed's.
_REPLACEABLE = (schedule.ForwardPass, schedule.ReduceGrads, schedule.OptimizerStep)


def instruction_map(engine_class: type) -> dict[type, Callable[..., None]]:
    """What a dynamic engine does for each pipeline instruction.

    Args:
        engine_class: class of the engine; instructions of its own, and functions that it or its script put into
            ``_INSTRUCTION_MAP`` in place of DeepSpeed's, are taken over.

    Raises:
        ValueError: if one of them stands in for something that must be ours.
    """
    functions = {instruction: function for instruction, (_, function) in _OURS.items()}
    for instruction, function in engine_class._INSTRUCTION_MAP.items():  # type: ignore[attr-defined]
        if getattr(function, "__module__", None) == PipelineEngine.__module__:
            continue
        if instruction in _REPLACEABLE:
            functions[instruction] = function
        elif instruction in _OURS:
            raise ValueError(
                f"{engine_class.__name__}._INSTRUCTION_MAP has {function.__qualname__} for {instruction.__name__}, "
                "which dynamic_pipeline replaces by its own so that losses do not depend on the cut; leave DeepSpeed's "
                f"there (of the built-in ones only {', '.join(i.__name__ for i in _REPLACEABLE)} may be replaced)"
            )
        else:
            functions[instruction] = function
    functions[schedule.OptimizerStep] = _refuse_together(functions[schedule.OptimizerStep])
    return {i: _timed(_OURS[i][0], function) if i in _OURS else function for i, function in functions.items()}
