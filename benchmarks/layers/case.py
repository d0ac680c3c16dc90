"""What a scenario offers to be timed: a layer, the dense layer it stands for, and a count of its work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scenarios.gpt import GPTConfig
from scenarios.report.interval import Estimate, median_of_ratios


@dataclass(frozen=True)
class Shape:
    """How large the layers are, and what they are given.

    Attributes:
        hidden: width.
        heads: of attention.
        seq_len: tokens of a sample.
        batch: samples.
    """

    hidden: int
    heads: int
    seq_len: int
    batch: int

    def model(self) -> GPTConfig:
        """The GPT that has such blocks."""
        return GPTConfig(depth=3, hidden=self.hidden, heads=self.heads, seq_len=self.seq_len)


@dataclass
class Case:
    """One layer at one point of a schedule.

    Attributes:
        amount: what sets it apart within its scenario, ``"90% pruned"`` for example.
        layer: the layer that saves work.
        dense: the plain layer that it stands for.
        activation: what ``layer`` is given: a float tensor ``[batch, seq, hidden]``, or a tuple with it in front.
        dense_activation: same for ``dense``.
        operations: called after a forward and backward of ``layer``: multiply-adds counted in it, as a share of
            those of ``dense``.
    """

    amount: str
    layer: nn.Module
    dense: nn.Module
    activation: Any
    dense_activation: Any
    operations: Callable[[], float]


def forward_backward_s(layer: nn.Module, activation: Any) -> float:
    """Time one forward and backward, the input's gradient included.

    Args:
        layer: any of the two layers of a case.
        activation: its input.

    Returns:
        Seconds.
    """
    given = activation if isinstance(activation, tuple) else (activation,)
    stream = given[0].detach().requires_grad_(True)
    given = (stream, *given[1:])
    gradient = torch.ones_like(stream)
    started_s = time.perf_counter()
    output = layer(given if isinstance(activation, tuple) else stream)
    (output[0] if isinstance(output, tuple) else output).backward(gradient)
    took_s = time.perf_counter() - started_s
    for parameter in layer.parameters():
        parameter.grad = None
    return took_s


def measure(case: Case, repeats: int) -> tuple[float, float, Estimate]:
    """Time a case and its dense layer in turns.

    Args:
        case: what to time.
        repeats: timed pairs, after two that are not counted.

    Returns:
        Median seconds of the layer, median seconds of the dense one, median of the pairs' ratios with its interval.
    """
    pairs = []
    for i in range(repeats + 2):
        pair = (forward_backward_s(case.layer, case.activation), forward_backward_s(case.dense, case.dense_activation))
        if i >= 2:
            pairs.append(pair)
    layers_s, denses_s = zip(*pairs, strict=True)
    return statistics.median(layers_s), statistics.median(denses_s), median_of_ratios(layers_s, denses_s)


def count_operations(layer: nn.Module, activation: Any) -> int:
    """Count the FLOPs of a forward and backward as ``torch.utils.flop_counter`` does, attention on a CPU included.

    Args:
        layer: any of the two layers of a case.
        activation: its input.
    """
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False, custom_mapping=_CPU_ATTENTION) as counter:
        forward_backward_s(layer, activation)
    return int(counter.get_total_flops())


def _attention_flops(*shapes: Any, factor: int) -> int:
    """FLOPs of SDPA's CPU kernel, which torch's counter does not know: full rectangles, as it counts the others."""
    (batch, heads, queries, width), (_, _, keys, _) = shapes[:2]
    return factor * batch * heads * queries * keys * width


def _forward_flops(q: Any, k: Any, *_: Any, **__: Any) -> int:
    return _attention_flops(q, k, factor=4)


def _backward_flops(_: Any, q: Any, k: Any, *__: Any, **___: Any) -> int:
    return _attention_flops(q, k, factor=10)


_CPU_ATTENTION: dict[Any, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}
