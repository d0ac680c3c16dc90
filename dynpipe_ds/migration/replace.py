"""Parameters that change their shape while training: compacted, pruned, split.

The optimizer goes on as if the parameter had always had its new shape: what it knows of each element
(master weight, moments, step count) follows that element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dynpipe_ds.agreement import first_error
from dynpipe_ds.migration.parameter_groups import State


@dataclass(frozen=True)
class ParameterReplacement:
    """One parameter of a local layer and what takes its place, under the same name.

    Attributes:
        owner: the module that holds the parameter.
        name: its name there, ``"weight"`` for example.
        parameter: the new one, of any shape, on the stage's device and in the model's dtype.
        carry: maps a tensor of the old parameter's shape to one of the new parameter's shape; called for
            each tensor of optimizer state. It must not depend on anything else that differs between
            replicas.
    """

    owner: nn.Module
    name: str
    parameter: nn.Parameter
    carry: Callable[[Tensor], Tensor]

    @property
    def old(self) -> nn.Parameter:
        """The parameter that is replaced, as long as it is in place."""
        found: nn.Parameter | None = self.owner._parameters.get(self.name)
        if found is None:
            raise ValueError(f"{type(self.owner).__name__} has no parameter {self.name!r} to replace")
        return found


def replace_parameters(engine: Any, replacements: Sequence[ParameterReplacement]) -> None:
    """Put new parameters in the place of old ones; collective over all ranks.

    Args:
        engine: the dynamic pipeline engine, between two batches.
        replacements: those of this rank's layers, the same on all replicas of a stage; may be empty.

    Raises:
        RuntimeError: on every rank, with the same text, if any rank could not do its part; nothing has
            changed then.
    """
    optimizer, module = engine.stage_optimizer, engine.module
    olds: list[nn.Parameter] = []
    states: dict[nn.Parameter, State] = {}
    error: Exception | None = None
    try:
        olds = [replacement.old for replacement in replacements]
        _refuse_tied(module, olds)
        _refuse_untrainable(replacements)
        for old, state, replacement in zip(olds, optimizer.export(olds), replacements, strict=True):
            states[replacement.parameter] = _carried(state, old, replacement)
    except Exception as caught:
        error = caught
    _agree(error, engine)
    try:
        index = optimizer.groups.index
        groups = {r.parameter: index[old] for old, r in zip(olds, replacements, strict=True) if old in index}
        for replacement in replacements:
            setattr(replacement.owner, replacement.name, replacement.parameter)
        engine.name_parameters()
        if replacements:
            optimizer.prepare(olds, groups)
    except Exception as caught:
        error = caught
    try:
        _agree(error, engine)
    except RuntimeError:
        optimizer.rollback()
        for old, replacement in zip(olds, replacements, strict=True):
            setattr(replacement.owner, replacement.name, old)
        engine.name_parameters()
        raise
    if replacements:
        optimizer.fill(states)


def _carried(state: State, old: nn.Parameter, replacement: ParameterReplacement) -> State:
    """The old parameter's state in the new one's shape."""
    new_shape = replacement.parameter.shape
    carried: State = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.numel() == old.numel() and value.dim() > 0:
            value = replacement.carry(value.detach().view(old.shape)).clone()
            if value.shape != new_shape:
                raise ValueError(
                    f"carry gave shape {tuple(value.shape)} for {replacement.name!r} of "
                    f"{type(replacement.owner).__name__}, whose new parameter has {tuple(new_shape)}"
                )
        carried[key] = value
    return carried


def _refuse_tied(module: Any, olds: Sequence[nn.Parameter]) -> None:
    tied = {p for layers in module.tied_layers().values() for i in layers if i in module.local_layers()
            for p in module.local_layers()[i].parameters()}
    for old in olds:
        if old in tied:
            raise ValueError("a parameter of a tied layer can't change its shape: its copies would not follow")


def _refuse_untrainable(replacements: Sequence[ParameterReplacement]) -> None:
    for replacement in replacements:
        if replacement.parameter.is_inference():
            raise ValueError(
                f"the new parameter {replacement.name!r} of {type(replacement.owner).__name__} was made inside "
                "torch.inference_mode() and can't be trained; make it outside, or inside torch.inference_mode(False)"
            )


def _agree(error: Exception | None, engine: Any) -> None:
    message = first_error(error, engine.device)
    if message is not None:
        raise RuntimeError(f"replacing parameters failed and was undone on every rank ({message})") from error
