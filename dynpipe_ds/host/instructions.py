"""Pipeline instructions that do not depend on where the model is cut.

They replace DeepSpeed's when ``dynamic_pipeline`` is enabled:

* each tensor that crosses a boundary says whether it wants a gradient back, so that a frozen prefix of
  the model does no backward and sends none;
* what is received, activations and gradients, lies in memory as it did where it came from, since kernels choose
  by layout; it has a dtype of its own (DeepSpeed's buffers are reused regardless of it), and is not copied again;
* the tensors between two stages travel together, not one after the other, and so do the plain values around them;
* several outputs go through one backward, not one each: the sums are then those of the undivided model;
* gradients of tied layers are added in layer order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from dynpipe_ds.host.halves import backward_input, backward_pass, backward_weight, in_flight_of, wants_backward
from dynpipe_ds.host.order import BackwardInput, BackwardWeight
from dynpipe_ds.host.owned import finishing_owned
from dynpipe_ds.host.passing import (
    BatchRefused,
    HandedOver,
    even_if_given_up,
    give_up,
    has_given_up,
    receive_activations,
    receive_gradients,
    send_activations,
    send_gradients,
    unless_given_up,
    unless_refused,
    unless_replica_refuses,
    with_flags,
)
from dynpipe_ds.measure import recorder as profiling
from dynpipe_ds.messages.values import tensors_in
from dynpipe_ds.migration.transport import exchange


def forward_pass(engine: Any, buffer_id: int) -> None:
    """Forward of a micro-batch through this stage, as DeepSpeed's, but on what was received itself."""
    inputs = engine.pipe_buffers["inputs"]
    received = inputs[buffer_id]
    if not engine.is_first_stage():
        inputs[buffer_id] = HandedOver(received)
    PipelineEngine._exec_forward_pass(engine, buffer_id)
    inputs[buffer_id] = received


def keep_loss(forward: Callable[..., None]) -> Callable[..., None]:
    """Keep the loss of a micro-batch until its backward; the engine keeps the newest.

    Args:
        forward: the instruction.
    """

    @wraps(forward)
    def run(engine: Any, buffer_id: int) -> None:
        forward(engine, buffer_id=buffer_id)
        if engine.is_last_stage() and torch.is_grad_enabled():
            in_flight_of(engine).losses[buffer_id] = engine.loss

    return run


def receive_output_gradients(engine: Any, buffer_id: int) -> None:
    """Receive the gradients of a micro-batch's outputs, and keep them until its backward."""
    receive_gradients(engine, buffer_id)
    in_flight_of(engine).gradients[buffer_id], engine.grad_layer = engine.grad_layer, None


def unless_incomplete(step: Callable[..., None]) -> Callable[..., None]:
    """Let no rank take the optimizer's step if a part of a backward has not run.

    Args:
        step: the instruction.
    """

    @wraps(step)
    def run(engine: Any, **kwargs: Any) -> None:
        missing = None if has_given_up(engine) else in_flight_of(engine).whats_missing()
        if missing is not None:
            message = (
                f"stage {engine.stage_id}: {missing}; that is a mistake in the order or in this library, please report "
                "it, and train without an order of your own meanwhile"
            )
            give_up(engine, BatchRefused(message))
        step(engine, **kwargs)

    return run


def load_micro_batch(engine: Any, buffer_id: int) -> None:
    """Load a micro-batch as DeepSpeed does, without asking for gradients of the data."""
    PipelineEngine._exec_load_micro_batch(engine, buffer_id)
    if engine.is_first_stage():
        for tensor in tensors_in(engine.pipe_buffers["inputs"][buffer_id]):
            tensor.requires_grad_(False)


def reduce_tied_gradients(engine: Any) -> None:
    """Give every copy of a tied weight the sum of all copies' gradients, added in layer order.

    Where only some of the copies are frozen, the batch is given up.
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
            give_up(engine, ValueError(
                f"tied layers {layers} (key {key!r}) are frozen in one place and trained in another; "
                "freeze or unfreeze all of them together"
            ))
        elif trainable[0]:
            for i in range(len(module.tied_weights(mine[0]))):
                _add_copies(engine, {layer: module.tied_weights(layer)[i] for layer in mine}, layers, owners)


def _add_copies(engine: Any, weights: dict[int, Any], layers: list[int], owners: list[int]) -> None:
    gradients = {}
    for layer, weight in weights.items():
        gradient = engine.dynamic.stage_optimizer.gradient(weight)
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
            edge = -1 if not layers else layers[0] if kind in (profiling.LOAD, profiling.FORWARD) else layers[-1]
            recorder.instruction(profiling.TRANSFER if _is_idle(engine, kind, kwargs) else kind, edge)
        function(engine, **kwargs)

    return run


def _is_idle(engine: Any, kind: int, kwargs: dict[str, int]) -> bool:
    """Whether there is nothing to compute in a part of a backward."""
    if has_given_up(engine):
        return True
    if kind == profiling.BACKWARD:
        return not wants_backward(engine, kwargs["buffer_id"])
    return kind == profiling.WEIGHT and in_flight_of(engine).halves[kwargs["buffer_id"]] is None


_OURS: dict[type, tuple[int, Callable[..., None]]] = {
    schedule.LoadMicroBatch: (profiling.LOAD, load_micro_batch),
    schedule.ForwardPass: (profiling.FORWARD, forward_pass),
    schedule.BackwardPass: (profiling.BACKWARD, backward_pass),
    BackwardInput: (profiling.BACKWARD, backward_input),
    BackwardWeight: (profiling.WEIGHT, backward_weight),
    schedule.SendActivation: (profiling.TRANSFER, send_activations),
    schedule.RecvActivation: (profiling.TRANSFER, receive_activations),
    schedule.SendGrad: (profiling.TRANSFER, send_gradients),
    schedule.RecvGrad: (profiling.TRANSFER, receive_output_gradients),
    schedule.ReduceTiedGrads: (profiling.REDUCE, reduce_tied_gradients),
    schedule.ReduceGrads: (profiling.REDUCE, PipelineEngine._exec_reduce_grads),
    schedule.OptimizerStep: (profiling.STEP, PipelineEngine._exec_optimizer_step),
}

# Where nothing but the measuring is ours, a client's own function can stand in for DeepSpeed's.
_REPLACEABLE = (schedule.ForwardPass, schedule.ReduceGrads, schedule.OptimizerStep)

_GUARDS: dict[type, tuple[Callable[[Callable[..., None]], Callable[..., None]], ...]] = {
    schedule.LoadMicroBatch: (even_if_given_up,),
    schedule.ForwardPass: (keep_loss, unless_given_up),
    schedule.BackwardPass: (unless_given_up,),
    BackwardInput: (unless_given_up,),
    BackwardWeight: (unless_given_up,),
    schedule.ReduceGrads: (finishing_owned, unless_replica_refuses),
    schedule.OptimizerStep: (unless_refused, unless_incomplete),
}


def check_schedule(name: str, engine_class: type) -> None:
    """Refuse planned orders where the client's own schedule would run instead, and nobody would notice.

    Args:
        name: the key ``schedule`` of the section.
        engine_class: class of the engine.

    Raises:
        ValueError: if it must be another one.
    """
    instructions = engine_class._INSTRUCTION_MAP  # type: ignore[attr-defined]
    own = sorted(one.__name__ for one in instructions if one not in PipelineEngine._INSTRUCTION_MAP)
    if name == "planned" and own:
        raise ValueError(
            f"schedule = 'planned': {engine_class.__name__} has instructions of its own, {', '.join(own)}, which run "
            "in a schedule of its own and not in a planned order; set schedule to 'auto' or '1f1b'"
        )


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
        if instruction in _OURS and instruction not in _REPLACEABLE:
            raise ValueError(
                f"{engine_class.__name__}._INSTRUCTION_MAP has {function.__qualname__} for {instruction.__name__}, "
                "which dynamic_pipeline replaces by its own so that losses do not depend on the cut; leave DeepSpeed's "
                f"there (of the built-in ones only {', '.join(i.__name__ for i in _REPLACEABLE)} may be replaced)"
            )
        for_buffer = issubclass(instruction, schedule.BufferOpInstruction)
        functions[instruction] = with_flags(function) if for_buffer else function
    for instruction, guards in _GUARDS.items():
        for guard in guards:
            functions[instruction] = guard(functions[instruction])
    return {i: _timed(_OURS[i][0], function) if i in _OURS else function for i, function in functions.items()}
