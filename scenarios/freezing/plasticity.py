"""Plasticity of a layer: how differently it answers from its past, and whether that has settled.

After Egeria (Wang et al., EuroSys 2023, section 4), with the similarity-preserving loss of Tung and
Mori (ICCV 2019, equations 1 to 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynpipe_ds import keep_in_checkpoints
from scenarios.gpt import Activation

MAX_ROWS = 256
# Set on a layer, these travel with it; the first one is kept in checkpoints.
_REFERENCE = "egeria_reference"
_SEEN = "egeria_seen"

# A layer's past: its tensors by name, on the CPU, as they were or as int8 (see to_int8).
Reference = dict[str, Tensor | tuple[Tensor, Tensor]]


def similarity(activation: Tensor, *, max_rows: int = MAX_ROWS) -> Tensor:
    """Compute the row-normalised similarity matrix of an activation.

    Tung and Mori compare the samples of a batch. A language model's micro-batch has few samples and
    many tokens, so here the rows are tokens, at most ``max_rows`` of them, evenly spaced.

    Args:
        activation: ``[..., features]``.
        max_rows: limit of rows ``b``, since the matrix has ``b * b`` entries.

    Returns:
        ``[b, b]`` in float32: ``A @ A.T`` with rows of unit length.
    """
    rows = activation.detach().float().flatten(0, -2)
    step = -(-rows.shape[0] // max_rows)
    rows = rows[::step]
    return F.normalize(rows @ rows.T, dim=1)


def sp_loss(left: Tensor, right: Tensor, *, max_rows: int = MAX_ROWS) -> float:
    """Compare two activations of the same input (Tung and Mori, equation 3).

    Args:
        left: ``[..., features]``.
        right: the same number of rows; the features may differ.
        max_rows: see :func:`similarity`.

    Returns:
        The squared Frobenius distance of both similarity matrices over ``b * b``; 0 when equal.
    """
    difference = similarity(left, max_rows=max_rows) - similarity(right, max_rows=max_rows)
    return float(difference.double().pow(2).mean())


def slope(values: Sequence[float]) -> float:
    """Fit a line through values at 0, 1, 2, … by least squares and return its slope."""
    count = len(values)
    centre = (count - 1) / 2
    spread = sum((i - centre) ** 2 for i in range(count))
    return sum((i - centre) * value for i, value in enumerate(values)) / spread


@dataclass
class Trend:
    """The plasticity of one layer over the evaluations, and whether it has settled.

    Attributes:
        raw: plasticities as measured.
        smoothed: their moving average.
        steepest: largest absolute slope seen, the layer's own scale.
        calm: evaluations in a row with a slope below the tolerance.
    """

    raw: list[float] = field(default_factory=list)
    smoothed: list[float] = field(default_factory=list)
    steepest: float = 0.0
    calm: int = 0

    def add(self, plasticity: float, *, window: int, tolerance: float) -> None:
        """Take in one evaluation.

        Args:
            plasticity: of the layer now.
            window: evaluations that the moving average and the line are taken over.
            tolerance: the slope counts as flat below this share of the layer's steepest slope.
        """
        self.raw.append(plasticity)
        recent = self.raw[-window:]
        self.smoothed.append(sum(recent) / len(recent))
        if len(self.smoothed) < window:
            return
        now = abs(slope(self.smoothed[-window:]))
        self.steepest = max(self.steepest, now)
        self.calm = self.calm + 1 if now <= tolerance * self.steepest else 0


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight of two or more dimensions to int8 with one scale a row, symmetric around 0.

    Returns:
        Values in ``[-127, 127]`` of the weight's shape, and ``[rows, 1, …]``: what one step is worth.
    """
    largest = weight.abs().amax(dim=tuple(range(1, weight.dim())), keepdim=True)
    scale = largest.clamp(min=torch.finfo(weight.dtype).tiny) / 127
    return (weight / scale).round().to(torch.int8), scale


def weights_of(reference: Reference) -> dict[str, Tensor]:
    """Return parameters and buffers of a reference, to compute with."""
    return {name: t if isinstance(t, Tensor) else t[0] * t[1] for name, t in reference.items()}


def take_reference(layer: nn.Module, *, bits: int = 32) -> None:
    """Make the layer's present weights its reference.

    Args:
        layer: stays as it is.
        bits: 8 rounds matrices to int8, a quarter of the bytes; 32 keeps every bit.
    """
    reference: Reference = {}
    for name, tensor in [*layer.named_parameters(), *layer.named_buffers()]:
        copy = tensor.detach().to("cpu", copy=True)
        reference[name] = to_int8(copy) if bits == 8 and copy.dim() > 1 and copy.is_floating_point() else copy
    setattr(layer, _REFERENCE, reference)
    keep_in_checkpoints(layer, _REFERENCE)


def reference_of(layer: nn.Module) -> Reference | None:
    """Return the reference that a layer carries, if any, and if the layer still has tensors of these names."""
    reference: Reference | None = getattr(layer, _REFERENCE, None)
    names = {name for name, _ in (*layer.named_parameters(), *layer.named_buffers())}
    return reference if reference is not None and reference.keys() == names else None


def drop_reference(layer: nn.Module) -> None:
    """Forget the layer's reference."""
    for name in (_REFERENCE, _SEEN):
        if hasattr(layer, name):
            delattr(layer, name)


def capture_next(layer: nn.Module) -> RemovableHandle:
    """Keep input and output of the layer's next forward, on the CPU.

    The hook removes itself after that one call, so a layer never moves with it.

    Args:
        layer: carries a reference.

    Returns:
        The hook's handle, for the case that no forward comes.
    """

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Activation) -> None:
        handle.remove()
        setattr(module, _SEEN, (_to_cpu(inputs[0]), _to_cpu(stream_of(output))))

    handle = layer.register_forward_hook(hook)
    return handle


def stream_of(activation: Activation) -> Tensor:
    """Return the residual stream, which comes first where layers add to the loss."""
    return activation if isinstance(activation, Tensor) else activation[0]


def _to_cpu(value: Any) -> Any:
    """Copy a tensor, or a tuple of some, to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    return tuple(map(_to_cpu, value)) if isinstance(value, (tuple, list)) else value


@torch.no_grad()
def plasticity(layer: nn.Module) -> float | None:
    """Compare what the layer answered with what its reference answers to the same input.

    The reference is run with the layer's own code and the old weights, on the CPU, without dropout.

    Args:
        layer: carries a reference that captured a forward.

    Returns:
        The similarity-preserving loss, or ``None`` where nothing was captured.
    """
    reference = reference_of(layer)
    seen: tuple[Any, Tensor] | None = getattr(layer, _SEEN, None)
    if reference is None or seen is None:
        return None
    given, answer = seen
    delattr(layer, _SEEN)
    modes = {module: module.training for module in layer.modules()}
    layer.eval()
    try:
        past = torch.func.functional_call(layer, weights_of(reference), (given,), strict=True)
    finally:
        for module, training in modes.items():
            module.training = training
    return sp_loss(answer, stream_of(past))
