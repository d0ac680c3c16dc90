"""One gradient norm for clipping, the same bits whatever the partition.

DeepSpeed's own norms depend on the cut: with a plain fp32 optimizer only the first stage is counted, with
ZeRO-1 and bf16 the order of summation follows the stages. Here each layer's sum of squares is taken in
float64, the layers' sums are added in layer order, and only the result is rounded to float32. What single
replicas own counts on each of them: a layer then has one sum a replica, added in their order.
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

from dynpipe_ds.owning import is_owned

Gradients = Iterable[tuple[nn.Parameter, Tensor]]
Squares = Iterable[tuple[nn.Parameter, Tensor]]  # float64 scalars


class GradientNorm:
    """Computes the norm over all stages and gives it to DeepSpeed's optimizers.

    Args:
        layer_of: layer index of every parameter of this stage; read anew at each call.
        num_layers: L, over all stages.
        owns: whether single replicas own parameters, on any stage.
        grid: DeepSpeed's pipeline grid.
        device: where the communication back-end works.
    """

    def __init__(
        self,
        layer_of: Callable[[], dict[nn.Parameter, int]],
        *,
        num_layers: int,
        owns: bool,
        grid: Any,
        device: torch.device,
    ) -> None:
        self._layer_of = layer_of
        self._num_layers = num_layers
        self._owns = owns
        self._grid = grid
        self._device = device

    def __call__(self, squares: Squares) -> Tensor:
        """Euclidean norm of all gradients of the model; collective over all ranks.

        Args:
            squares: parameters of this stage and the sums of their gradients' squares, the same on all replicas but
                for what single ones own.

        Returns:
            A float32 scalar on this rank's device, equal on all ranks.
        """
        replica = int(self._grid.get_data_parallel_id())
        num_columns = int(self._grid.get_data_parallel_world_size()) if self._owns else 1
        sums = [0.0] * (self._num_layers * num_columns)
        if replica < num_columns:
            layer_of = self._layer_of()
            place = {parameter: i for i, parameter in enumerate(layer_of)}  # whatever group it is in
            counted = [(p, square) for p, square in squares if p in layer_of and self._counts(p, replica)]
            counted.sort(key=lambda pair: place[pair[0]])
            # Python adds float64 as torch does, but in one go: a tensor operation each would cost more than the norms.
            values = torch.stack([square.to(self._device) for _, square in counted]).tolist() if counted else []
            for (parameter, _), value in zip(counted, values, strict=True):
                sums[layer_of[parameter] * num_columns + replica] += value
        by_layer = torch.tensor(sums, dtype=torch.float64).to(self._device)
        # A layer is on one stage, and a column is one replica's: the others add zeros, which is exact in any order.
        dist.all_reduce(by_layer)
        return by_layer.sum().sqrt().float()

    def _counts(self, parameter: nn.Parameter, replica: int) -> bool:
        if replica and not is_owned(parameter):
            return False  # the first replica has the same
        if getattr(parameter, "ds_pipe_replicated", False):
            return False  # a tied copy, counted where its key first occurs
        return bool(self._grid.get_slice_parallel_rank() == 0 or is_model_parallel_parameter(parameter))

    def install(self, optimizer: Any) -> None:
        """Make a DeepSpeed optimizer clip, and check for overflow, by this norm; plain ones are left alone."""
        if isinstance(optimizer, BF16_Optimizer):
            self._install_bf16(optimizer)
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            optimizer.scaled_global_norm = lambda norm_type=2: self._zero_norm(optimizer)

    def _zero_norm(self, optimizer: DeepSpeedZeroOptimizer) -> Tensor:
        norm = self(_zero_squares(optimizer, self._device))
        return torch.where(norm.isfinite(), norm, torch.full_like(norm, torch.inf))

    def _install_bf16(self, optimizer: BF16_Optimizer) -> None:
        original = type(optimizer).get_grads_for_norm

        # BF16_Optimizer.step() asks for gradients and combines their norms over the stages. It gets
        # the finished norm from the first stage and zeros from the others: the same bits everywhere.
        def get_grads_for_norm(for_clipping: bool = False) -> Any:
            if for_clipping:
                return original(optimizer, for_clipping=True)
            norm = self(sums_of_squares(self._bf16_gradients(optimizer)))
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


def sums_of_squares(gradients: Gradients) -> Squares:
    """The sum of squares of every gradient, each in float64."""
    return ((parameter, _square(gradient)) for parameter, gradient in gradients)


def _square(gradient: Tensor) -> Tensor:
    gradient = gradient.detach()
    if gradient.is_sparse:
        gradient = gradient.coalesce().values()  # all other elements are zero
    norm: Tensor = torch.linalg.vector_norm(gradient.flatten(), dtype=torch.float64)
    return norm.square()


def _zero_squares(optimizer: DeepSpeedZeroOptimizer, device: torch.device) -> Squares:
    """Sums of squares of all gradients of a stage of which every replica holds a share.

    A gradient that lies across the end of a share, which follows the cut, is put together first: added up in
    pieces, the sum would be rounded otherwise.
    """
    squares: list[tuple[nn.Parameter, Tensor]] = []
    for i, members in enumerate(optimizer.bit16_groups):
        pieces, group = zero_pieces(optimizer, i), optimizer.real_dp_process_group[i]
        found = torch.zeros(len(members), dtype=torch.float64, device=device)
        for j, parameter in enumerate(members):
            piece = pieces.get(parameter)
            if len(optimizer.param_to_partition_ids[i].get(optimizer.get_param_id(parameter), ())) > 1:
                piece = _put_together(optimizer, i, parameter, piece)
            if piece is not None:
                found[j] = _square(piece)
        if dist.get_world_size(group) > 1:
            dist.all_reduce(found, group=group)  # one replica has a sum, the others add zeros
        squares += zip(members, found, strict=True)
    return squares


def zero_pieces(optimizer: DeepSpeedZeroOptimizer, group: int) -> dict[nn.Parameter, Tensor]:
    """What this rank holds of the gradients of a parameter group, by parameter.

    Args:
        optimizer: after it has reduced them.
        group: index of the parameter group.
    """
    parameters = optimizer.params_in_partition[group]
    if optimizer.cpu_offload:
        pairs = zip(parameters, optimizer.offload_gradient_dict[group], strict=True)
        return {p: g for p, g in pairs if optimizer.get_param_id(p) in optimizer.norm_for_param_grads}
    gradients = (g for g in optimizer.averaged_gradients[group] if not getattr(g, "_zero_padding", False))
    return dict(zip(parameters, gradients, strict=False))


def _put_together(
    optimizer: DeepSpeedZeroOptimizer, group: int, parameter: nn.Parameter, piece: Tensor | None
) -> Tensor | None:
    """The whole of a gradient that lies across replicas, on the first of them that has a piece; collective."""
    owners = sorted(optimizer.param_to_partition_ids[group][optimizer.get_param_id(parameter)])
    replicas = optimizer.real_dp_process_group[group]
    rank = dist.get_rank(replicas)
    whole = torch.zeros(parameter.numel(), device=parameter.device)
    if piece is not None:
        start = int(optimizer.grad_start_offset[group][rank][optimizer.get_param_id(parameter)])
        whole[start : start + piece.numel()] = piece.flatten()
    dist.all_reduce(whole, group=replicas)
    return whole if rank == owners[0] else None


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients down so that the model's norm is at most ``max_norm``."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
