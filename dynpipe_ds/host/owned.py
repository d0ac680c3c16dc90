"""What DeepSpeed does to parameters of all replicas, and not to those that single replicas own.

With one replica there is nothing to keep apart: an owned parameter is the whole, and trains as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from dynpipe_ds.host import accelerator
from dynpipe_ds.host.gradient_norm import zero_pieces
from dynpipe_ds.host.optimizers.stage_optimizer import StageOptimizer
from dynpipe_ds.host.passing import give_up, has_given_up
from dynpipe_ds.host.specs import layer_name, tied_key
from dynpipe_ds.owning import Replica, is_owned, owned_names, owner_of
from dynpipe_ds.ranks.agreement import difference_of_replicas, gather, together

Owned = dict[int, tuple[str, ...]]
"""Names of the parameters that replicas own, by layer, over all stages; layers without any are left out."""

_NOT_BROADCAST = "ds_optim_param"  # what DeepSpeed calls a parameter that is another one on every rank


# -- at the start -----------------------------------------------------------------------------


def agree_on_owned(module: Any) -> Owned:
    """What replicas own of a model; collective over all ranks.

    Args:
        module: the pipeline module, with its first layers.

    Raises:
        ValueError: on every rank, if something in it can't be owned, or replicas differ in what they own.
    """
    layers = module.local_layers()
    together(lambda: _check(module), accelerator.device(), ValueError)
    mine = {i: owned_names(layer) for i, layer in layers.items()}
    shapes = [
        f"{name} {list(parameter.shape)} of layer {i}"
        for i, layer in layers.items() for name, parameter in layer.named_parameters() if is_owned(parameter)
    ]
    problem = difference_of_replicas(shapes, "the parameters that replicas own", module.stage_id)
    if problem is not None:
        raise ValueError(problem)
    return {i: names for part in gather(mine) for i, names in sorted(part.items()) if names}


def _check(module: Any) -> None:
    here: Replica = module.replica
    for i, layer in module.local_layers().items():
        spec = module._layer_specs[i]
        for name, parameter in layer.named_parameters():
            owner = owner_of(parameter)
            if owner is None:
                continue
            what = f"{name} of layer {i} ({layer_name(spec)})"
            if owner != here:
                raise ValueError(
                    f"{what} is marked as {owner}'s and this is {here}; let a LayerSpec build the layer, and mark the "
                    "parameter in its constructor, with what building_replica() gives there"
                )
            if tied_key(spec) is not None:
                raise ValueError(
                    f"{what} is owned by a replica and belongs to a tied layer (key {tied_key(spec)!r}), whose weights "
                    "are those of other layers, too; own parameters of layers that are not tied"
                )
            if module._grid.get_slice_parallel_world_size() > 1:
                raise ValueError(
                    f"{what} is owned by a replica, and tensor parallelism cuts layers as well; do without one of both"
                )


def refuse_unmanaged(module: Any) -> None:
    """Refuse to train what replicas own by DeepSpeed's own engine, which would make it equal; collective.

    Args:
        module: the pipeline module, with its first layers.

    Raises:
        ValueError: on every rank, if replicas own something.
    """
    if not dist.is_initialized():
        return  # no pipeline was built
    start = module._local_start
    owned = {
        start + i: names for i, function in enumerate(module.forward_funcs)
        if isinstance(function, nn.Module) and (names := owned_names(function))
    }
    found = sorted(item for part in gather(owned) for item in part.items())
    if found:
        layer, names = found[0]
        raise ValueError(
            f"{names[0]} of layer {layer} is owned by a replica, and DeepSpeed's own engine gives all replicas equal "
            'parameters; add "dynamic_pipeline": {"enabled": true} to its configuration'
        )


def check_still_owned(module: Any) -> None:
    """Refuse parameters that were put in the place of others and are not owned as these were.

    Args:
        module: the pipeline module.

    Raises:
        ValueError: naming layer and parameter.
    """
    if not module.owned:
        return
    for i, layer in module.local_layers().items():
        changed = sorted({*owned_names(layer)} ^ {*module.owned.get(i, ())})
        if changed:
            raise ValueError(
                f"{changed[0]} of layer {i} was put in the place of another parameter, and only one of both is owned "
                "by a replica; use engine.replace_parameters, or mark it by own_by_replica as before"
            )


@contextmanager
def not_broadcast(module: nn.Module) -> Iterator[None]:
    """Let DeepSpeed leave what replicas own as it is where it gives all of them the first one's parameters.

    Args:
        module: the pipeline module.
    """
    owned = [p for p in module.parameters() if is_owned(p) and not hasattr(p, _NOT_BROADCAST)]
    for parameter in owned:
        setattr(parameter, _NOT_BROADCAST, True)
    try:
        yield
    finally:
        for parameter in owned:
            delattr(parameter, _NOT_BROADCAST)


# -- in every batch ---------------------------------------------------------------------------


def without_owned(module: Any, gradients: Sequence[Any]) -> list[Any]:
    """Of the gradients that DeepSpeed is about to add up over replicas, those of what all replicas have.

    Args:
        module: the pipeline module.
        gradients: of its parameters that are trained and not empty, in order.
    """
    if module.replica.count == 1 or not module.owned:
        return list(gradients)
    trained = (p for p in module.parameters() if p.requires_grad and p.numel())
    return [gradient for p, gradient in zip(trained, gradients, strict=True) if not is_owned(p)]


class OwnedGradients:
    """The gradients of what this replica owns, from the end of the last backward to the optimizer's step.

    Args:
        engine: the pipeline engine; asked for its optimizer at each call.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._found: dict[str, list[tuple[str, Any]]] = {}

    def forget_layers(self) -> None:
        """Look at the layers anew."""
        self._found.clear()

    def finish(self) -> None:
        """Let layers finish their gradients, in layer order, and put these where the optimizer reads them.

        Where one raises, or gives what can't be used, the batch is given up.
        """
        if has_given_up(self._engine):
            return
        try:
            for where, module in self._modules("finish_gradients"):
                for parameter, gradient in module.finish_gradients().items():
                    self._put(where, parameter, gradient)
        except Exception as error:  # noqa: BLE001 - a layer may raise anything
            give_up(self._engine, error)

    def drop(self) -> None:
        """Let layers forget what they have gathered for gradients of a batch that was dropped."""
        for _, module in self._modules("drop_gradients"):
            module.drop_gradients()

    def _modules(self, method: str) -> list[tuple[str, Any]]:
        """Modules of this stage that have a method, in the order of layers and of modules in them."""
        if method not in self._found:
            self._found[method] = [
                (f"layer {i}.{path}".rstrip("."), module)
                for i, layer in sorted(self._engine.module.local_layers().items())
                for path, module in layer.named_modules()
                if callable(getattr(module, method, None))
            ]
        return self._found[method]

    def _put(self, where: str, parameter: nn.Parameter, gradient: Tensor) -> None:
        what = f"{where}.finish_gradients gave a gradient"
        if not is_owned(parameter):
            raise ValueError(
                f"{what} of a parameter of shape {list(parameter.shape)} that no replica owns; mark it by "
                "own_by_replica, or leave its gradient to autograd"
            )
        if gradient.shape != parameter.shape or not gradient.is_floating_point() or gradient.layout != torch.strided:
            raise ValueError(
                f"{what} of shape {list(gradient.shape)} in {gradient.dtype} ({gradient.layout}), where the parameter "
                f"has {list(parameter.shape)}; give a dense one of that shape in floating point"
            )
        if parameter.requires_grad:
            self._optimizer.put_gradient(parameter, gradient)

    @property
    def _optimizer(self) -> StageOptimizer:
        optimizer: StageOptimizer = self._engine.stage_optimizer
        return optimizer

    @contextmanager
    def held_out(self) -> Iterator[None]:
        """Keep them out of ZeRO-1's sums over replicas, which are made within; its step reads them as they are."""
        wrapper, module = self._engine.optimizer, self._engine.module
        if not isinstance(wrapper, DeepSpeedZeroOptimizer) or module.replica.count == 1 or not module.owned:
            yield
            return
        place = "grad_accum" if wrapper.use_grad_accum_attribute else "grad"
        twins, held = self._optimizer.groups.twins, []
        for i in twins:
            for parameter in wrapper.bit16_groups[i]:
                held.append((i, parameter, getattr(parameter, place)))
                setattr(parameter, place, None)
        yield
        pieces = {i: zero_pieces(wrapper, i) for i in twins}
        for i, parameter, gradient in held:
            if gradient is not None and parameter in pieces[i]:
                pieces[i][parameter].copy_(gradient.view_as(pieces[i][parameter]))


def finishing_owned(reduce: Callable[..., None]) -> Callable[..., None]:
    """Before gradients are added up over replicas, finish those that are not.

    Args:
        reduce: the instruction.
    """

    @wraps(reduce)
    def run(engine: Any, **kwargs: Any) -> None:
        owned: OwnedGradients = engine.dynamic.pipeline.owned
        owned.finish()
        with owned.held_out():
            reduce(engine, **kwargs)

    return run
