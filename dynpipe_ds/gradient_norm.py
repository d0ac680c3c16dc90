"""One gradient norm for clipping, the same bits whatever the partition.

DeepSpeed's own norms depend on the cut: with a plain fp32 optimizer only the first stage is counted, with
ZeRO-1 and bf16 the order of summation follows the stages. Here each layer's sum of squares is taken in
float64, the layers' sums are added in layer order, and only the result is rounded to float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

# (parameter, its gradient or the piece of it that this rank holds)
Gradients = Iterable[tuple[nn.Parameter, Tensor]]


class GradientNorm:
    """Computes the norm over all stages and gives it to DeepSpeed's optimizers.

    Args:
        layer_of: layer index of every parameter of this stage; read anew at each call.
        num_layers: L, over all stages.
        grid: DeepSpeed's pipeline grid.
        device: where the communication back-end works.
    """

    def __init__(
        self,
        layer_of: Callable[[], dict[nn.Parameter, int]],
        *,
        num_layers: int,
        grid: Any,
        device: torch.device,
    ) -> None:
        self._layer_of = layer_of
        self._num_layers = num_layers
        self._grid = grid
        self._device = device

    def __call__(self, gradients: Gradients, *, sharded: bool) -> Tensor:
        """Euclidean norm of all gradients of the model; collective over all ranks.

        Args:
            gradients: this rank's parameters and gradients.
            sharded: whether replicas hold different pieces (ZeRO-1) or equal copies.

        Returns:
            A float32 scalar on this rank's device, equal on all ranks.
        """
        squares = torch.zeros(self._num_layers, dtype=torch.float64, device=self._device)
        if sharded or self._grid.get_data_parallel_id() == 0:
            layer_of = self._layer_of()
            for parameter, gradient in gradients:
                if parameter in layer_of and self._counts(parameter):
                    norm = torch.linalg.vector_norm(gradient.detach().flatten(), dtype=torch.float64)
                    squares[layer_of[parameter]] += norm.square().to(self._device)
        # A layer is on one stage: the others add zeros, which is exact in any order.
        dist.all_reduce(squares)
        return squares.sum().sqrt().float()

    def _counts(self, parameter: nn.Parameter) -> bool:
        if getattr(parameter, "ds_pipe_replicated", False):
            return False  # a tied copy, counted where its key first occurs
        return bool(self._grid.get_slice_parallel_rank() == 0 or is_model_parallel_parameter(parameter))

    def install(self, optimizer: Any) -> None:
        """Make a DeepSpeed optimizer clip, and check for overflow, by this norm.

        Args:
            optimizer: the engine's optimizer; plain ones are left to ``clip_fp32_gradients``.
        """
        if isinstance(optimizer, BF16_Optimizer):
            self._install_bf16(optimizer)
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            optimizer.scaled_global_norm = lambda norm_type=2: self._zero_norm(optimizer)

    def _zero_norm(self, optimizer: DeepSpeedZeroOptimizer) -> Tensor:
        def gradients() -> Gradients:
            for i, parameters in enumerate(optimizer.params_in_partition):
                gradients_and_padding = optimizer.averaged_gradients[i]
                pieces = (g for g in gradients_and_padding if not getattr(g, "_zero_padding", False))
                yield from zip(parameters, pieces, strict=False)

        norm = self(gradients(), sharded=True)
        return torch.where(norm.isfinite(), norm, torch.full_like(norm, torch.inf))

    def _install_bf16(self, optimizer: BF16_Optimizer) -> None:
        original = type(optimizer).get_grads_for_norm

        # BF16_Optimizer.step() asks for gradients and combines their norms over the stages. It gets
        # the finished norm from the first stage and zeros from the others: the same bits everywhere.
        def get_grads_for_norm(for_clipping: bool = False) -> Any:
            if for_clipping:
                return original(optimizer, for_clipping=True)
            norm = self(self._bf16_gradients(optimizer), sharded=False)
            counted = self._grid.get_model_parallel_rank() == 0
            return [norm if counted else torch.zeros_like(norm)], {}

        optimizer.get_grads_for_norm = get_grads_for_norm

    @staticmethod
    def _bf16_gradients(optimizer: BF16_Optimizer) -> Gradients:
        for group, gradients, present in zip(
            optimizer.bf16_groups,
            optimizer.fp32_groups_gradients,
            optimizer.fp32_groups_has_gradients,
            strict=True,
        ):
            for parameter, gradient, has_gradient in zip(group, gradients, present, strict=True):
                if has_gradient:
                    yield parameter, gradient


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients down so that the model's norm is at most ``max_norm``.

    Args:
        parameters: this rank's parameters.
        norm: the norm over all stages, a scalar.
        max_norm: the bound.
    """
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
