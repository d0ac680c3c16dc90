"""Does a checkpoint fit the model and the optimizer that are to take it in?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import nn

from dynpipe_ds.checkpoint.manifest import CheckpointError, Manifest, tensor_forms
from dynpipe_ds.checkpoint.owned import whole_form
from dynpipe_ds.checkpoint.save import optimizer_entry
from dynpipe_ds.owning import owned_names

if TYPE_CHECKING:
    from dynpipe_ds.stage import Stage


def check_layers(manifest: Manifest, stage: Stage, root: Path, *, strict: bool) -> None:
    """Compare names, shapes and dtypes of this rank's present layers with what is stored.

    Raises:
        CheckpointError: naming file, tensor and both forms.
    """
    names = stage.module.layer_names()
    if len(names) != len(manifest.layers):
        raise CheckpointError(
            f"{root} holds a model of {len(manifest.layers)} layers and this one has {len(names)}"
        )
    for i, layer in stage.local_layers().items():
        problem = _difference(manifest, i, layer, Here(owned_names(layer), stage.module.replica.count), strict=strict)
        if problem:
            file = root / (manifest.layers[i].file or "")
            raise CheckpointError(f"{file} does not fit layer {i} ({names[i]}): {problem}")


class Here(NamedTuple):
    """What replicas own of a present layer.

    Attributes:
        owned: names of parameters.
        num_replicas: of each stage.
    """

    owned: tuple[str, ...]
    num_replicas: int


def _difference(manifest: Manifest, index: int, layer: nn.Module, here: Here, *, strict: bool) -> str:
    entry = manifest.layers[index]
    stored, present = entry.tensors, tensor_forms(layer.state_dict())
    adopting = [prefix for prefix, module in layer.named_modules() if _adopts_shapes(module)]
    missing, unknown = sorted(present.keys() - stored.keys()), sorted(stored.keys() - present.keys())
    if strict and not adopting and (missing or unknown):
        return f"it lacks {missing} and has {unknown} too many (load_module_strict=False allows that)"
    for key in sorted(stored.keys() & present.keys()):
        theirs = whole_form(stored[key], key, entry.owned, manifest.num_replicas)
        ours = whole_form(present[key], key, *here)
        if theirs.dtype != ours.dtype:
            return (
                f"{key} is {theirs} there and {ours} here; train in the precision of the checkpoint, or convert "
                "its layer files"
            )
        if theirs.shape != ours.shape and not any(not prefix or key.startswith(f"{prefix}.") for prefix in adopting):
            rows = ", over all replicas" if key in entry.owned or key in here.owned else ""
            return f"{key} is {theirs} there and {ours} here{rows}"
    return ""


def _adopts_shapes(module: nn.Module) -> bool:
    """Whether a module has a say in how its tensors are loaded, so that another shape may be fine."""
    if type(module).__module__.startswith("torch."):  # some of torch's own override it for older formats only
        return False
    overridden = type(module)._load_from_state_dict is not nn.Module._load_from_state_dict
    return overridden or bool(module._load_state_dict_pre_hooks)


def check_optimizer(manifest: Manifest, stage: Stage, root: Path) -> None:
    """Compare the kind of optimizer and its parameter groups with what is stored.

    Raises:
        CheckpointError: naming both.
    """
    theirs, ours = manifest.optimizer, optimizer_entry(stage)
    kinds = {"plain": "without ZeRO", "flat": "under ZeRO-1 or bf16", "none": "not there"}
    problem = ""
    if theirs.kind != ours.kind:
        problem = f"is {kinds[theirs.kind]} and the present one is {kinds[ours.kind]}"
    elif theirs.name and theirs.name != ours.name:
        problem = f"is {theirs.name} and the present one is {ours.name}"
    elif theirs.num_groups != ours.num_groups:
        problem = f"has {theirs.num_groups} parameter groups and the present one {ours.num_groups}"
    if problem:
        raise CheckpointError(f"the optimizer in {root} {problem}; use the same, or load_optimizer_states=False")
