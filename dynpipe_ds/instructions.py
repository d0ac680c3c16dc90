"""Pipeline instructions that do not depend on where the model is cut.

They replace DeepSpeed's when ``dynamic_pipeline`` is enabled:

* each tensor that crosses a boundary says whether it wants a gradient back, so that a frozen prefix of
  the model does no backward and sends none;
* received tensors get buffers of their own dtype (DeepSpeed's are reused regardless of it);
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
from dynpipe_ds.migration.transport import exchange

_META_SIZE = 256  # int32 numbers, one message of fixed size


def _as_tuple(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _encode_meta(outputs: Tensor | tuple[Tensor, ...]) -> list[int]:
    tensors = _as_tuple(outputs)
    numbers = [int(isinstance(outputs, tuple)), len(tensors)]
    for tensor in tensors:
        numbers += [
            PipelineEngine.DTYPE_TO_ID[tensor.dtype], int(tensor.requires_grad), tensor.dim(), *tensor.shape,
        ]
    if len(numbers) > _META_SIZE:
        raise ValueError(
            f"the {len(tensors)} tensors between two stages need {len(numbers)} numbers to describe, more "
            f"than {_META_SIZE}; pass fewer tensors from layer to layer"
        )
    return numbers


def _decode_meta(numbers: list[int]) -> tuple[bool, list[tuple[torch.dtype, bool, list[int]]]]:
    is_tuple, count, position = bool(numbers[0]), numbers[1], 2
    specs = []
    for _ in range(count):
        dtype_id, wants_gradient, dim = numbers[position : position + 3]
        shape = numbers[position + 3 : position + 3 + dim]
        specs.append((PipelineEngine.ID_TO_DTYPE[dtype_id], bool(wants_gradient), shape))
        position += 3 + dim
    return is_tuple, specs


def _send(engine: Any, tensors: Sequence[Tensor], stage: int) -> None:
    """Send contiguous tensors to a neighbour, all at once: one after the other, each waits to be asked for."""
    exchange({engine.grid.stage_to_global(stage_id=stage): tensors}, {})


def _receive(engine: Any, tensors: Sequence[Tensor], stage: int) -> None:
    """Fill tensors with what a neighbour sends at once."""
    exchange({}, {engine.grid.stage_to_global(stage_id=stage): tensors})


def send_activations(engine: Any, buffer_id: int) -> None:
    """Send a micro-batch's outputs to the next stage, preceded once a batch by what they are."""
    outputs = engine.pipe_buffers["outputs"][buffer_id]
    if engine.dynamic_shape or engine.first_output_send:
        engine.first_output_send = False
        numbers = _encode_meta(outputs)
        meta = torch.tensor(numbers + [0] * (_META_SIZE - len(numbers)), dtype=torch.int32)
        _send(engine, [meta.to(engine.device)], engine.next_stage)
    _send(engine, [tensor.detach().contiguous() for tensor in _as_tuple(outputs)], engine.next_stage)


def receive_activations(engine: Any, buffer_id: int) -> None:
    """Receive a micro-batch's inputs from the previous stage."""
    if engine.dynamic_shape or engine.pipe_recv_buf is None:
        meta = torch.empty(_META_SIZE, dtype=torch.int32, device=engine.device)
        _receive(engine, [meta], engine.prev_stage)
        engine.pipe_recv_buf = _decode_meta(meta.tolist())
    is_tuple, specs = engine.pipe_recv_buf
    received = [torch.empty(shape, dtype=dtype, device=engine.device) for dtype, _, shape in specs]
    _receive(engine, received, engine.prev_stage)
    for tensor, (_, wants_gradient, _) in zip(received, specs, strict=True):
        tensor.requires_grad_(wants_gradient)
    engine.pipe_buffers["inputs"][buffer_id] = tuple(received) if is_tuple else received[0]


def send_gradients(engine: Any, buffer_id: int) -> None:
    """Send the gradients of the inputs that want one to the previous stage."""
    wanted = [t for t in _as_tuple(engine.pipe_buffers["inputs"][buffer_id]) if t.requires_grad]
    gradients = [torch.zeros_like(t) if t.grad is None else t.grad.contiguous() for t in wanted]
    _send(engine, gradients, engine.prev_stage)
    engine.pipe_buffers["inputs"][buffer_id] = None


def receive_gradients(engine: Any, buffer_id: int) -> None:
    """Receive the gradients of the outputs that want one from the next stage."""
    wanted = [t for t in _as_tuple(engine.pipe_buffers["outputs"][buffer_id]) if t.requires_grad]
    engine.grad_layer = tuple(torch.empty(t.shape, dtype=t.dtype, device=engine.device) for t in wanted)
    _receive(engine, engine.grad_layer, engine.next_stage)


def _wants_backward(engine: Any, buffer_id: int) -> bool:
    if engine.is_last_stage():
        return bool(engine.loss.requires_grad)
    return any(t.requires_grad for t in _as_tuple(engine.pipe_buffers["outputs"][buffer_id]))


def backward_pass(engine: Any, buffer_id: int) -> None:
    """Backward of a micro-batch through this stage; nothing where all of it is frozen."""
    if engine.is_last_stage():
        if _wants_backward(engine, buffer_id):
            PipelineEngine._exec_backward_pass(engine, buffer_id)
        return
    outputs = [t for t in _as_tuple(engine.pipe_buffers["outputs"][buffer_id]) if t.requires_grad]
    if outputs:
        if engine.using_bf16_optimizer:
            engine.optimizer.clear_lp_grads()
        engine._running_engine_backward = True
        try:
            torch.autograd.backward(outputs, engine.grad_layer)
        finally:
            engine._running_engine_backward = False
        if engine.using_bf16_optimizer and not engine._config.bfloat16_config.immediate_grad_update:
            engine.optimizer.update_hp_grads(clear_lp_grads=False)
    engine.pipe_buffers["output_tensors"][buffer_id] = None
    engine.pipe_buffers["outputs"][buffer_id] = None
    engine.grad_layer = None


def load_micro_batch(engine: Any, buffer_id: int) -> None:
    """Load a micro-batch as DeepSpeed does, without asking for gradients of the data."""
    PipelineEngine._exec_load_micro_batch(engine, buffer_id)
    if engine.is_first_stage():
        for tensor in _as_tuple(engine.pipe_buffers["inputs"][buffer_id]):
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
    schedule.ForwardPass: (profiling.FORWARD, PipelineEngine._exec_forward_pass),
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
    found: dict[type, Callable[..., None]] = {i: _timed(kind, function) for i, (kind, function) in _OURS.items()}
    for instruction, function in engine_class._INSTRUCTION_MAP.items():  # type: ignore[attr-defined]
        if getattr(function, "__module__", None) == PipelineEngine.__module__:
            continue
        if instruction in _REPLACEABLE:
            found[instruction] = _timed(_OURS[instruction][0], function)
        elif instruction in _OURS:
            raise ValueError(
                f"{engine_class.__name__}._INSTRUCTION_MAP has {function.__qualname__} for {instruction.__name__}, "
                "which dynamic_pipeline replaces by its own so that losses do not depend on the cut; leave DeepSpeed's "
                f"there (of the built-in ones only {', '.join(i.__name__ for i in _REPLACEABLE)} may be replaced)"
            )
        else:
            found[instruction] = function
    return found
