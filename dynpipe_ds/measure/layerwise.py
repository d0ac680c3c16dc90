"""Layer times and memory of a model on this device before any training, one layer at a time.

A layer is built, brought to the device, run forward and backward on what the layers before it gave, and dropped
again, so a model that needs several devices can be measured on one. Marks and meter are the engine's own
(:mod:`dynpipe_ds.measure.recorder`), so the profile means the same as one measured in training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dynpipe_ds.host import accelerator
from dynpipe_ds.host.specs import LayerSpec, forward_function, layer_name
from dynpipe_ds.measure.gather import layer_sizes
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.measure.recorder import BACKWARD, FORWARD, WEIGHT, ActivationMeter, BatchRecorder, BatchTimes
from dynpipe_ds.schedule import split_at_once
from dynpipe_ds.splitting.graph import CantBeSplit
from dynpipe_ds.splitting.halves import backward_inputs

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """What training keeps besides parameters, as the DeepSpeed configuration decides it.

    Attributes:
        dtype: of parameters and activations.
        gradient_dtype: what gradients are summed in between micro-batches.
        optimizer_bytes: bytes of optimizer state for each trainable element, master weights included, on one rank.
    """

    dtype: torch.dtype = torch.float32
    gradient_dtype: torch.dtype = torch.float32
    optimizer_bytes: float = 8.0

    @classmethod
    def from_config(cls, config: dict[str, Any], *, num_replicas: int = 1) -> TrainingMemory:
        """Read what a DeepSpeed configuration says.

        Args:
            config: the whole configuration, as read from its JSON.
            num_replicas: data-parallel replicas, over which ZeRO-1 spreads optimizer state.

        Raises:
            ValueError: for an optimizer whose state is not known.
        """
        dtype = torch.float32
        for key, reduced in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("bfloat16", torch.bfloat16)):
            if config.get(key, {}).get("enabled"):
                dtype = reduced
        names = {None: dtype, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
        gradient_dtype = names[config.get("data_types", {}).get("grad_accum_dtype")]
        optimizer_bytes = _state_bytes(config.get("optimizer"))
        sharded = config.get("zero_optimization", {}).get("stage", 0) > 0
        if sharded or dtype != torch.float32:
            optimizer_bytes += torch.float32.itemsize  # master weights
        if sharded:
            optimizer_bytes /= num_replicas
        return cls(dtype=dtype, gradient_dtype=gradient_dtype, optimizer_bytes=optimizer_bytes)


def _state_bytes(section: dict[str, Any] | None) -> float:
    """Bytes of state for each element, found by one step of torch's optimizer on a small parameter."""
    if section is None:
        return 8.0  # Adam's, which nearly everybody trains with
    name = str(section.get("type", "")).lower()
    classes = {known.lower(): getattr(torch.optim, known) for known in ("Adam", "AdamW", "SGD", "Adagrad", "RMSprop")}
    if name not in classes:
        raise ValueError(
            f"optimizer type {section.get('type')!r}: how much state it keeps is not known here (known: "
            f"{', '.join(classes)}); give the bytes for each parameter by --optimizer-bytes"
        )
    keys = ("lr", "betas", "eps", "momentum", "amsgrad")
    given = {key: value for key, value in section.get("params", {}).items() if key in keys}
    parameter = nn.Parameter(torch.zeros(1024))
    optimizer = classes[name]([parameter], **{"lr": 1e-3, **given})
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [v for v in optimizer.state[parameter].values() if isinstance(v, Tensor) and v.numel() > 1]
    return sum(v.nbytes for v in held) / parameter.numel()


class LayerError(RuntimeError):
    """A layer (or the loss) could not be built or run; the cause is what it raised."""


@dataclass(frozen=True)
class _Layer:
    """A layer on the device.

    Attributes:
        index: in the model.
        function: what to call with its input.
        module: what has its parameters; ``None`` for a function.
        loss: what the last layer's output goes through.
    """

    index: int
    function: Callable[[Any], Any]
    module: nn.Module | None
    loss: Callable[[Any], Tensor] | None

    def run(
        self, recorder: BatchRecorder, x: Any, meter: Any, *, checkpointed: bool, split: bool = False
    ) -> tuple[BatchTimes, Any]:
        """Run it forward and backward once; its input's ``requires_grad`` says whether layers before it train.

        Its backward is split if asked for, and possible.
        """
        given = _map(lambda t: t.detach().requires_grad_(t.requires_grad), x)
        # A copy is no leaf, as inside a stage, so layers may change their input in place.
        x = _map(lambda t: t.clone(), given)
        recorder.start(meter)
        if split:
            recorder.follow(split_at_once(1, 1, 0), 0)
        recorder.instruction(FORWARD, self.index)
        y = self._forward(recorder, x, checkpointed=checkpointed)
        result = y if self.loss is None else self.loss(y)
        outputs = [t for t in _tensors(result) if t.requires_grad]
        if outputs:
            gradients = [torch.ones_like(t) for t in outputs]
            recorder.instruction(BACKWARD, self.index)
            wanting = [t for t in _tensors(given) if t.requires_grad]
            if not (split and wanting and self._split(recorder, outputs, gradients, wanting)):
                torch.autograd.backward(outputs, gradients)
        return recorder.stop(), _map(lambda t: t.detach().requires_grad_(t.requires_grad), y)

    def _split(
        self, recorder: BatchRecorder, outputs: list[Tensor], gradients: list[Tensor], inputs: list[Tensor]
    ) -> bool:
        """Run the backward in two halves; false if it must run whole."""
        try:
            half = backward_inputs(outputs, gradients, inputs)
        except CantBeSplit:
            return False
        recorder.instruction(WEIGHT, self.index)
        half.run()
        return True

    def _forward(self, recorder: BatchRecorder, x: Any, *, checkpointed: bool) -> Any:
        inputs = _tensors(x)
        has_parameters = self.module is not None and any(True for _ in self.module.parameters())
        if not (checkpointed and has_parameters and any(t.requires_grad for t in inputs)):
            return recorder.run(self.index, self.function, x)

        def again(*values: Any) -> Any:
            return recorder.run(self.index, self.function, values if isinstance(x, tuple) else values[0])

        with recorder.checkpoint(self.index, inputs):
            return checkpoint(again, *(x if isinstance(x, tuple) else (x,)), use_reentrant=True)


def measure_layers(
    layers: Sequence[Any],
    inputs: Any,
    labels: Any = None,
    *,
    loss_fn: LossFunction | None = None,
    memory: TrainingMemory,
    num_micro_batches: int = 1,
    repeats: int = 5,
    warmup: int = 2,
    checkpointed: bool = False,
) -> PipelineProfile:
    """Run every layer on this device and measure it.

    Args:
        layers: as given to ``PipelineModule``: ``LayerSpec``, modules (copied), functions.
        inputs: what the first layer takes: one micro-batch, a tensor or a tuple of tensors.
        labels: what ``loss_fn`` takes besides the last layer's output.
        loss_fn: as given to ``PipelineModule``; counted to the last layer. ``None``: no loss.
        memory: what training keeps.
        num_micro_batches: M, written into the profile.
        repeats: measured passes, at least 1; layer times are their medians.
        warmup: passes before them.
        checkpointed: activation checkpointing of every layer (interval 1).

    Returns:
        A profile without partition.

    Raises:
        LayerError: when a layer raises, with its index and name.
    """
    device = accelerator.device()
    x, labels = _to(inputs, device, memory.dtype), _to(labels, device, None)
    recorder, measured, counted = BatchRecorder(), [], False

    def measure(index: int, spec: Any) -> LayerProfile:  # when it returns, the layer is gone
        nonlocal x, counted
        with_loss = loss_fn is not None and index == len(layers) - 1
        layer = _build(index, spec, partial(_call_loss, loss_fn, labels) if with_loss else None, device, memory.dtype)
        whole, halves = (
            [layer.run(recorder, x, None, checkpointed=checkpointed, split=split)[0] for _ in range(warmup + repeats)]
            for split in (False, True)
        )
        activation_bytes, counted, x = _metered(layer, recorder, x, counted, checkpointed=checkpointed)
        return _layer_profile(layer_name(spec), layer, whole[warmup:], halves[warmup:], activation_bytes, memory)

    for index, spec in enumerate(layers):
        try:
            measured.append(measure(index, spec))
        except Exception as error:
            cause = f"{type(error).__name__}: {error}"
            raise LayerError(f"layer {index} ({layer_name(spec)}) can't be built and run: {cause}") from error
    return PipelineProfile(0, (), num_micro_batches, tuple(measured), ())


def _metered(
    layer: _Layer, recorder: BatchRecorder, x: Any, counted: bool, *, checkpointed: bool
) -> tuple[int, bool, Any]:
    """Activation bytes of the layer, whether its output is among them, and the output.

    A tensor that two layers keep counts for the first one, as in training.
    """
    meter = ActivationMeter(nn.ModuleList() if layer.module is None else layer.module)
    x = _map(lambda t: t.detach().requires_grad_(t.requires_grad), x)
    outputs: list[Tensor] = []
    kept = layer.function

    def function(value: Any) -> Any:
        if counted:
            meter.count(-1, _tensors(value))
        y = kept(value)
        outputs[:] = _tensors(y)
        return y

    _, y = replace(layer, function=function).run(recorder, x, meter, checkpointed=checkpointed)
    meter.count(-2, outputs)
    return meter.num_bytes.get(layer.index, 0), not meter.num_bytes.get(-2), y


def _layer_profile(
    name: str, layer: _Layer, whole: Sequence[BatchTimes], halves: Sequence[BatchTimes], activation_bytes: int,
    memory: TrainingMemory,
) -> LayerProfile:
    backward_s, halves_s, weight_s = (
        median(seconds.get(layer.index, 0.0) for seconds in found)
        for found in (
            [t.backward_s for t in whole], [t.backward_s for t in halves],
            [{i: later_s for i, (_, later_s) in t.halves.items()} for t in halves],
        )
    )
    sizes = layer_sizes(
        nn.ModuleList() if layer.module is None else layer.module,
        lambda p: round(p.numel() * memory.optimizer_bytes) if p.requires_grad else 0,
        memory.gradient_dtype,
    )
    return LayerProfile(
        name=name,
        forward_s=median(times.forward_s.get(layer.index, 0.0) for times in whole),
        backward_s=backward_s,
        activation_bytes=activation_bytes,
        weight_s=min(weight_s, halves_s),
        split_s=max(0.0, halves_s - backward_s) if weight_s else 0.0,
        **asdict(sizes),
    )


def _build(
    index: int, spec: Any, loss: Callable[[Any], Tensor] | None, device: torch.device, dtype: torch.dtype
) -> _Layer:
    if isinstance(spec, LayerSpec | nn.Module):
        module = spec.build() if isinstance(spec, LayerSpec) else copy.deepcopy(spec)
        module = module.to(device=device, dtype=None if dtype == torch.float32 else dtype)
        forward = forward_function(spec)
        return _Layer(index, module if forward is None else partial(forward, module), module, loss)
    if not callable(spec):
        raise TypeError(f"it is {spec!r}; a layer is a LayerSpec, a module or a function")
    return _Layer(index, spec, None, loss)


def _call_loss(loss_fn: Any, labels: Any, y: Any) -> Tensor:
    loss: Tensor = loss_fn(y, labels)
    return loss


def _tensors(value: Any) -> list[Tensor]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [item for item in values if isinstance(item, Tensor)]


def _map(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply to a tensor, or to every tensor of a tuple."""
    if isinstance(value, tuple | list):
        return tuple(_map(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value


def _to(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Bring tensors to the device; floating ones to the type of the parameters."""
    return _map(lambda t: t.to(device, dtype if dtype is not None and t.is_floating_point() else t.dtype), value)
