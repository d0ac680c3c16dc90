"""Watching a layer's gradients: their sum over some batches, whatever the optimizer does with them.

Gradients live between backward and step, inside ``train_batch``, and every optimizer keeps them elsewhere. A
hook on the parameter sees each one as it is made: one micro-batch's, on this replica, before clipping.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dynpipe_ds import keep_in_checkpoints

# Set on a layer: sums of the gradients of its parameters by name, in float32. Not one of the model's weights, but
# it travels when the layer moves and is kept in checkpoints.
_ATTRIBUTE = "gradient_sum"


class _AddUp:
    """A tensor hook that adds gradients to a sum, and takes itself off after the batch's last one.

    It must be gone before layers move, which may be before anyone else has a say.
    """

    def __init__(self, parameter: nn.Parameter, total: Tensor, num_micro_batches: int) -> None:
        self._total = total
        self._left = num_micro_batches
        self.handle: RemovableHandle = parameter.register_hook(self)

    def __call__(self, gradient: Tensor) -> None:
        self._total.add_(gradient.detach())
        self._left -= 1
        if self._left == 0:
            self.handle.remove()

    def __reduce__(self) -> Any:
        raise TypeError("it belongs to one batch on one rank")


def watch_gradients(layer: nn.Module, num_micro_batches: int) -> Iterable[RemovableHandle]:
    """Add the gradients of the next batch to the layer's sum.

    Args:
        layer: gets a sum if it has none.
        num_micro_batches: how many backwards the batch will have.

    Returns:
        Handles of the hooks, for parameters that a micro-batch leaves without a gradient.
    """
    total: dict[str, Tensor] = getattr(layer, _ATTRIBUTE, {})
    setattr(layer, _ATTRIBUTE, total)
    keep_in_checkpoints(layer, _ATTRIBUTE)
    handles = []
    for name, parameter in layer.named_parameters():
        if parameter.requires_grad:
            present = total.get(name)
            if present is None or present.shape != parameter.shape:  # pruned, say: start afresh
                present = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
            total[name] = present.to(parameter.device)  # a checkpoint gives it back on the host
            handles.append(_AddUp(parameter, total[name], num_micro_batches).handle)
    return handles


def take_norm(layer: nn.Module, group: Any = None) -> float | None:
    """Return the norm of the layer's summed gradients, the mean of its replicas, and begin a new sum.

    The replicas' sums are added first, a layer at a time: what is added to what does then not depend on the
    other layers of the stage, and so not on the partition.

    Args:
        layer: was watched, on every replica alike.
        group: process group of the replicas; ``None`` without distributed training.

    Returns:
        The sum of absolute values, as in AutoFreeze's code; ``None`` if the layer was not watched.
    """
    total: dict[str, Tensor] | None = getattr(layer, _ATTRIBUTE, None)
    if total is None:
        return None
    delattr(layer, _ATTRIBUTE)
    gradient = torch.cat([tensor.flatten() for tensor in total.values()])
    if group is not None:
        dist.all_reduce(gradient, group=group)
        gradient /= dist.get_world_size(group)  # comparable with that of another number of replicas
    return float(torch.linalg.vector_norm(gradient, ord=1, dtype=torch.float64))

