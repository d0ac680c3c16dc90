"""Parameters that change their shape while training: compacted, pruned, split.

The optimizer goes on as if the parameter had always had its new shape: what it knows of each element
(master weight, moments, step count) follows that element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from dynpipe_ds.host.optimizers.groups import Entry, State
from dynpipe_ds.host.optimizers.stage_optimizer import NewBuffers
from dynpipe_ds.migration.freeze import among_replicas
from dynpipe_ds.migration.subject import Subject
from dynpipe_ds.migration.transaction import MigrationError, Transaction
from dynpipe_ds.owning import inherit
from dynpipe_ds.ranks.agreement import difference_of_replicas

if TYPE_CHECKING:
    from dynpipe_ds.module import DynamicPipelineModule


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


def replace_parameters(stage: Subject, replacements: Sequence[ParameterReplacement]) -> None:
    """Put new parameters in the place of old ones; collective over all ranks.

    Raises:
        MigrationError: on every rank, with the same text, if any rank could not do its part; nothing has
            changed then.
    """
    optimizer, module = stage.optimizer, stage.module
    if optimizer is None:
        raise MigrationError(
            "parameters can't be replaced without an optimizer to tell: make it first, in deepspeed.initialize or by "
            "engine._configure_optimizer"
        )
    change = Transaction(optimizer, stage.device, "replacing parameters")
    olds = change.together(lambda: _checked(replacements, module))
    pairs = [f"{tuple(old.shape)} by {tuple(r.parameter.shape)}" for old, r in zip(olds, replacements, strict=True)]
    problem = difference_of_replicas(pairs, "the shapes of parameters to replace", stage.stage_id)
    if problem is not None:
        raise MigrationError(problem)
    states: dict[nn.Parameter, State] = {}

    def carry() -> NewBuffers:
        """Whole states, put together from all replicas' shares: ``carry`` maps whole tensors."""
        for old, state, replacement in zip(olds, optimizer.export(olds), replacements, strict=True):
            states[replacement.parameter] = _carried(state, old, replacement)
        if not replacements:
            return NewBuffers()
        index, news = optimizer.groups.index, dict(zip(olds, (r.parameter for r in replacements), strict=True))
        coming = [Entry(new, index.get(old), states[new]) for old, new in news.items()]
        return optimizer.make_buffers(olds, coming, [news.get(p, p) for p in module.parameters()], is_here=True)

    def put(parameters: Iterable[nn.Parameter]) -> None:
        for replacement, parameter in zip(replacements, parameters, strict=True):
            setattr(replacement.owner, replacement.name, parameter)
        stage.pipeline.name_parameters()

    def take_in() -> None:
        index = optimizer.groups.index
        groups = {r.parameter: index[old] for old, r in zip(olds, replacements, strict=True) if old in index}
        put(replacement.parameter for replacement in replacements)
        if replacements:
            optimizer.prepare(olds, groups, buffers)

    buffers, journey = among_replicas(change, stage, carry)
    journey.start()
    change.run(take_in, lambda: put(olds), states, journey=journey)


def _checked(replacements: Sequence[ParameterReplacement], module: DynamicPipelineModule) -> list[nn.Parameter]:
    """The parameters that are replaced."""
    olds = [replacement.old for replacement in replacements]
    local = module.local_layers()
    tied = {p for layers in module.tied_layers().values() for i in layers if i in local for p in local[i].parameters()}
    if not tied.isdisjoint(olds):
        raise ValueError("a parameter of a tied layer can't change its shape: its copies would not follow")
    for replacement in replacements:
        if replacement.parameter.is_inference():
            raise ValueError(
                f"the new parameter {replacement.name!r} of {type(replacement.owner).__name__} was made inside "
                "torch.inference_mode() and can't be trained; make it outside, or inside torch.inference_mode(False)"
            )
    for old, replacement in zip(olds, replacements, strict=True):
        inherit(old, replacement.parameter)
    return olds


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
