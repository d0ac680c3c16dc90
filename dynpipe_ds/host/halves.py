"""The backward of a micro-batch in DeepSpeed's engine: whole, or in two halves.

What a backward takes, a loss or received gradients, is kept for each micro-batch, and so is what is left of one that
was begun; DeepSpeed's engine has one place for each. The key is the micro-batch's pipe buffer, which nobody else has
from its forward to the end of its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dynpipe_ds.host.passing import links_of
from dynpipe_ds.measure import recorder as profiling
from dynpipe_ds.messages.crossing import Passage
from dynpipe_ds.splitting.graph import CantBeSplit
from dynpipe_ds.splitting.halves import ParameterHalf, backward_inputs
from dynpipe_ds.telling import log


@dataclass(frozen=True)
class _Whole:
    """A backward that waits as a whole, since no input wants a gradient."""

    loss: Any
    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor]


class InFlight:
    """The micro-batches of a batch on one rank, by pipe buffer.

    Attributes:
        losses: of the last stage.
        gradients: received, of the outputs that wanted one; ``None`` for one that there is not.
        halves: what is left of each backward that was begun, in the order in which they were; ``None``: nothing.
    """

    def __init__(self) -> None:
        self.losses: dict[int, Any] = {}
        self.gradients: dict[int, tuple[Tensor | None, ...]] = {}
        self.halves: dict[int, ParameterHalf | _Whole | None] = {}
        self._owed: Counter[Tensor] = Counter()
        self._layers: dict[Any, int] = {}
        self._num_late: int | None = None
        self._prompt: frozenset[Any] | None = None
        self._refused: str | None = None
        self._reasons: dict[str, None] = {}

    @property
    def whole_because(self) -> tuple[str, ...]:
        """Why backwards of this stage that an order splits have run whole; empty if they could be split so far."""
        return tuple(self._reasons)

    def begin(self, num_late: int | None = None) -> None:
        """Forget the last batch, which may have ended in the middle.

        Args:
            num_late: how many layers of this stage, from its first one on, wait for the second half of a backward;
                ``None``: all.
        """
        self._num_late, self._prompt = num_late, None
        self.losses.clear()
        self.gradients.clear()
        self.halves.clear()
        self._owed.clear()
        self._layers = {}

    def forget_layers(self) -> None:
        """Let other layers be tried again."""
        self.begin()
        self._refused = None

    def whats_missing(self) -> str | None:
        """Which part of a backward has not run, at the end of a batch; ``None`` if all has."""
        num_forwards = max(len(self.losses), len(self.gradients))
        num_halves = sum(half is not None for half in self.halves.values())
        num_parameters = len(+self._owed)
        if not (num_forwards or num_halves or num_parameters):
            return None
        return (
            f"{num_forwards} forwards were left without a backward, {num_halves} backwards without their second half "
            f"(W), and {num_parameters} parameters without the gradients of all their forwards"
        )

    def layers_of(self, module: Any) -> dict[Any, int]:
        """Layer index of every parameter of a stage; asked once a batch, since it takes as long as a small product.

        Args:
            module: of the stage.
        """
        self._layers = self._layers or module.layer_of_parameter()
        return self._layers

    def prompt(self, engine: Any) -> frozenset[Any]:
        """Parameters of layers that do not wait for the second half of a backward; found once a batch.

        Args:
            engine: of this stage.
        """
        if self._num_late is None:
            return frozenset()
        if self._prompt is None:
            first = engine.module.parts[engine.stage_id] + self._num_late
            self._prompt = frozenset(p for p, layer in self.layers_of(engine.module).items() if layer >= first)
        return self._prompt

    def owe(self, half: ParameterHalf) -> None:
        """Note that parameters get a gradient later.

        Args:
            half: that gives it.
        """
        self._owed.update(half.parameters)

    def paid(self, parameters: frozenset[Tensor]) -> None:
        """Note that they got it.

        Args:
            parameters: that did.
        """
        self._owed.subtract(parameters)

    def check_splits(self, engine: Any) -> None:
        """Ask whether a backward of this stage can be split at all.

        Args:
            engine: of this stage.

        Raises:
            CantBeSplit: if not.
        """
        if engine.module.activation_checkpoint_interval > 0:
            raise CantBeSplit("activation checkpointing of the pipeline")
        if self._refused is not None:
            raise CantBeSplit(self._refused)

    def cant_split(self, stage: int, reason: str, *, has_tried: bool) -> None:
        """Tell once why backwards of this stage run whole, and do not try again what failed.

        Args:
            stage: which one.
            reason: as :class:`CantBeSplit` says it; empty if nothing is to be told.
            has_tried: whether something raised in the middle.
        """
        if has_tried:
            self._refused = reason
        if reason and reason not in self._reasons:
            self._reasons[reason] = None
            log.info(f"dynamic_pipeline: stage {stage} runs its backwards whole, since they can't be split: {reason}")


def in_flight_of(engine: Any) -> InFlight:
    """The micro-batches on an engine's rank.

    Args:
        engine: a dynamic one.
    """
    in_flight: InFlight = engine.dynamic.pipeline.in_flight
    return in_flight


def wants_backward(engine: Any, buffer_id: int) -> bool:
    """Whether anything of a micro-batch on this stage wants a gradient.

    Args:
        engine: of this stage.
        buffer_id: of the micro-batch.
    """
    if engine.is_last_stage():
        loss = in_flight_of(engine).losses.get(buffer_id)
        return loss is not None and bool(loss.requires_grad)
    return any(tensor.requires_grad for tensor in links_of(engine).sent[buffer_id].wanting)


# -- the instructions -------------------------------------------------------------------------


def backward_pass(engine: Any, buffer_id: int) -> None:
    """Backward of a micro-batch through this stage; nothing where all of it is frozen."""
    _run_whole(engine, _take(engine, buffer_id))


def backward_input(engine: Any, buffer_id: int) -> None:
    """The gradients of a micro-batch's inputs; all of the backward, where it can't be split."""
    in_flight = in_flight_of(engine)
    taken = _take(engine, buffer_id)
    in_flight.halves.pop(buffer_id, None)  # of an earlier micro-batch: what is begun comes last
    in_flight.halves[buffer_id] = None
    if taken is None:
        return
    inputs = [tensor for tensor in links_of(engine).received.get(buffer_id, Passage()).wanting if tensor.requires_grad]
    if inputs and in_flight.prompt(engine) and any(isinstance(half, _Whole) for half in in_flight.halves.values()):
        _finish_all(engine)  # those wait with all layers, whose gradients are added up in the order of micro-batches
    if not inputs:
        in_flight.halves[buffer_id] = taken
    elif engine.is_last_stage():
        _split_loss(engine, buffer_id, taken, inputs)
    else:
        with _running_backward(engine):
            is_split = _split(engine, buffer_id, taken.outputs, taken.gradients, inputs)
        if not is_split:
            _finish_all(engine)
            _run_whole(engine, taken)
    half = in_flight.halves[buffer_id]
    if isinstance(half, ParameterHalf) and (prompt := in_flight.prompt(engine)):
        _run_half(engine, half, profiling.BACKWARD, prompt)


def backward_weight(engine: Any, buffer_id: int) -> None:
    """The gradients of the parameters, of a micro-batch whose inputs have theirs."""
    in_flight = in_flight_of(engine)
    half = in_flight.halves[buffer_id]
    in_flight.halves[buffer_id] = None
    if isinstance(half, ParameterHalf):
        _run_half(engine, half, profiling.WEIGHT)
    else:
        _run_whole(engine, half)


def _run_half(engine: Any, half: ParameterHalf, kind: int, only: frozenset[Any] | None = None) -> None:
    with _adding_gradients(engine):
        in_flight_of(engine).paid(half.run(_marking(engine, kind), only))


# -- the whole --------------------------------------------------------------------------------


def _take(engine: Any, buffer_id: int) -> _Whole | None:
    """What a micro-batch's backward takes, off the places where it was kept; nothing if there is none."""
    in_flight = in_flight_of(engine)
    if engine.is_last_stage():
        wants = wants_backward(engine, buffer_id)
        loss = in_flight.losses.pop(buffer_id, None)
        return _Whole(loss, (), ()) if wants else None
    outputs = links_of(engine).sent.pop(buffer_id).wanting
    pairs = zip(outputs, in_flight.gradients.pop(buffer_id), strict=True)
    gradients = {tensor: gradient for tensor, gradient in pairs if gradient is not None and tensor.requires_grad}
    engine.pipe_buffers["output_tensors"][buffer_id] = None
    engine.pipe_buffers["outputs"][buffer_id] = None
    return _Whole(None, tuple(gradients), tuple(gradients.values())) if gradients else None


def _run_whole(engine: Any, taken: _Whole | None) -> None:
    if taken is None:
        return
    if taken.loss is not None:
        engine.loss = taken.loss
        PipelineEngine._exec_backward_pass(engine, None)
        return
    with _adding_gradients(engine):
        torch.autograd.backward(taken.outputs, taken.gradients)


@contextmanager
def _running_backward(engine: Any) -> Iterator[None]:
    """Tell DeepSpeed's hooks that the backward is the engine's, not the script's."""
    engine._running_engine_backward = True
    try:
        yield
    finally:
        engine._running_engine_backward = False


@contextmanager
def _adding_gradients(engine: Any) -> Iterator[None]:
    """Do around what adds up parameters' gradients what DeepSpeed does around a backward."""
    if engine.using_bf16_optimizer:
        engine.optimizer.clear_lp_grads()
    with _running_backward(engine):
        yield
    if engine.using_bf16_optimizer and not engine._config.bfloat16_config.immediate_grad_update:
        engine.optimizer.update_hp_grads(clear_lp_grads=False)


# -- the halves -------------------------------------------------------------------------------


def _split(
    engine: Any, buffer_id: int, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> bool:
    """Run the first half and keep the other; false if the backward must run whole."""
    in_flight = in_flight_of(engine)
    try:
        in_flight.check_splits(engine)
        half = backward_inputs(outputs, gradients, inputs)
    except CantBeSplit as error:
        in_flight.cant_split(engine.stage_id, str(error), has_tried=error.__cause__ is not None)
        return False
    in_flight.halves[buffer_id] = half
    in_flight.owe(half)
    return True


class _Halved(TorchFunctionMode):
    """Inside, ``loss.backward()`` is something else: DeepSpeed scales a loss, and does much around its backward.

    Args:
        run: what it is, given the loss as DeepSpeed has scaled it.
    """

    def __init__(self, run: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch's, but for that one."""
        if func is Tensor.backward:
            return self._run(args[0])
        return func(*args, **(kwargs or {}))


def _split_loss(engine: Any, buffer_id: int, taken: _Whole, inputs: Sequence[Tensor]) -> None:
    def run(loss: Tensor) -> None:
        if not _split(engine, buffer_id, [loss], [None], inputs):
            _finish_all(engine)
            engine._running_engine_backward = True
            if engine.using_bf16_optimizer:
                engine.optimizer.clear_lp_grads()
            torch.autograd.backward([loss])

    engine.loss = taken.loss
    with _Halved(run):
        PipelineEngine._exec_backward_pass(engine, buffer_id)
    if isinstance(in_flight_of(engine).halves[buffer_id], ParameterHalf):
        engine.loss = taken.loss.detach()  # and with the outputs the graph goes, as far as nobody needs it
        engine.pipe_buffers["outputs"][buffer_id] = None


def _finish_all(engine: Any) -> None:
    """Run what is left of earlier backwards, before a whole one adds up gradients: in the order of micro-batches."""
    for buffer_id in in_flight_of(engine).halves:
        backward_weight(engine, buffer_id)


def _marking(engine: Any, kind: int) -> Callable[[Tensor, Callable[[], None]], None] | None:
    """What tells the recorder which layer's gradients are computed, when those of the layer before are added up."""
    recorder = engine.module.recorder
    if recorder is None:
        return None
    layers = in_flight_of(engine).layers_of(engine.module)
    return lambda parameter, settle: recorder.mark_layer(kind, layers.get(parameter, -1), settle)
