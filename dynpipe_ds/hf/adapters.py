"""LoRA adapters of ``peft`` on the layers of a model: small trained matrices beside frozen weights (Hu et al. 2021).

``peft`` itself decides where adapters go, makes them and runs them. What is here lets it do so layer by layer, as a
stage builds its layers, with the same random numbers wherever the model is cut.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.hf.folder import open_weights

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_NAME = "default"
_PREFIX = "base_model.model."
_SUPPORTED = frozenset({
    "r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "fan_in_fan_out", "init_lora_weights",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "use_rslora", "lora_bias", "task_type",
    "base_model_name_or_path", "revision", "inference_mode", "peft_type", "peft_version", "auto_mapping",
    "runtime_config",
})  # fmt: skip


class Adapters:
    """Which modules of a model have adapters, and where these come from.

    Args:
        adapter: a ``peft.LoraConfig`` for new adapters, or a folder that ``peft`` wrote.
        skeleton: the whole model, named as that of ``transformers``, without memory.

    Attributes:
        config: as ``peft`` has completed it.
        targets: full names of the modules that have adapters, sorted.
        folder: where their weights are; ``None`` for new ones.

    Raises:
        ImportError: without ``peft``.
        ValueError: naming what can't be.
    """

    def __init__(self, adapter: Any, skeleton: nn.Module) -> None:
        _check_peft()
        from peft import LoraModel

        self.folder = Path(adapter).expanduser() if isinstance(adapter, str | Path) else None
        config = _read(self.folder) if self.folder is not None else copy.deepcopy(adapter)
        _check(config)
        if self.folder is None and not config.init_lora_weights:
            raise ValueError(
                f"LoraConfig(init_lora_weights={config.init_lora_weights!r}) leaves new adapters without values that "
                "are the same for every cut: set True or 'gaussian'"
            )
        config.inference_mode = False
        try:
            tuner = LoraModel(skeleton, config, _NAME)
        except ValueError as error:
            raise ValueError(f"peft refuses this adapter for {type(skeleton).__name__}: {error}") from error
        self.config = tuner.peft_config[_NAME]
        _check(self.config)  # peft has rewritten what old files say of experts
        self.targets = tuple(sorted(tuner.targeted_module_names))
        self._seed = torch.initial_seed()
        if self.folder is not None:
            named = saved_parameters({"": skeleton})
            _compare(self.folder, {stored_name(name): tuple(p.shape) for name, p in named.items()})

    def add_to(self, part: nn.Module, stored_as: str) -> nn.Module:
        """Freeze a part of a model and put adapters in it.

        Args:
            part: with or without memory.
            stored_as: its name in the model.

        Returns:
            The part, or what now stands in its place. The adapters have no values yet (:meth:`fill`).
        """
        from peft import inject_adapter_in_model

        part.requires_grad_(False)
        own = [name for name in self.targets if f"{name}.".startswith(f"{stored_as}.")]
        if not own:
            return part
        config = copy.deepcopy(self.config)
        config.target_modules, config.exclude_modules = own, None
        config.layers_to_transform = config.layers_pattern = None
        whole = skeleton_of({stored_as: part}, nn.Module())
        inject_adapter_in_model(config, whole, _NAME)
        return whole.get_submodule(stored_as)

    def fill(self, parts: Mapping[str, nn.Module]) -> None:
        """Give adapters their values: those of the folder, or new ones, which follow from torch's seed and the name.

        Args:
            parts: of the model, with memory, by their names in it.
        """
        if self.folder is not None:
            _read_into(self.folder, {stored_name(name): p for name, p in saved_parameters(parts).items()})
            return
        for stored_as, part in parts.items():
            for path, module in part.named_modules():
                name = f"{stored_as}.{path}" if path else stored_as
                if name in self.targets:
                    self._reset(module, name)

    def _reset(self, module: Any, name: str) -> None:
        digest = hashlib.blake2b(f"{self._seed} {name}".encode(), digest_size=7).digest()
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
            torch.default_generator.manual_seed(int.from_bytes(digest, "big"))
            module.reset_lora_parameters(_NAME, self.config.init_lora_weights)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is an adapter's."""
    return any(step.startswith("lora_") for step in name.split("."))


def saved_parameters(parts: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters in parts of a model that ``peft`` saves: adapters, and what stands below them in embeddings.

    Args:
        parts: by their names in the model.

    Returns:
        Parameters by their full names.
    """
    named = {
        f"{stored_as}.{name}".lstrip("."): parameter
        for stored_as, part in parts.items() for name, parameter in part.named_parameters()
    }  # fmt: skip
    return {name: parameter for name, parameter in named.items() if is_adapter(name) or _is_embedding(name)}


def _is_embedding(name: str) -> bool:
    """Whether ``peft`` saves this frozen weight with the adapters on it; of other names it saves none."""
    *_, owner, below, _ = ("", "", *name.split("."))
    return below == "base_layer" and owner in ("embed_tokens", "lm_head")


def stored_name(name: str) -> str:
    """What the files of ``peft`` call an adapter's parameter."""
    return _PREFIX + ".".join(step for step in name.split(".") if step != _NAME)


def skeleton_of(parts: Mapping[str, nn.Module], root: nn.Module) -> nn.Module:
    """Put parts of a model where their names say.

    Args:
        parts: by their names in the model.
        root: they are put into it.

    Returns:
        The root.
    """
    for name, part in parts.items():
        *way, last = name.split(".")
        place = root
        for step in way:
            if not hasattr(place, step):
                place.add_module(step, nn.Module())
            place = place.get_submodule(step)
        place.add_module(last, part)
    return root


def _check_peft() -> None:
    if importlib.util.find_spec("peft") is None:
        raise ImportError(
            "adapter= of causal_lm_layers needs peft, not installed here: pip install 'dynpipe_ds[peft]'", name="peft"
        )


def _read(folder: Path) -> Any:
    from peft import PeftConfig

    for file in (CONFIG_FILE, WEIGHTS_FILE):
        if not (folder / file).is_file():
            raise ValueError(f"{folder} holds no {file}: give the folder that save_pretrained of peft wrote")
    return PeftConfig.from_pretrained(str(folder))


def _check(config: Any) -> None:
    from peft import LoraConfig

    if type(config) is not LoraConfig:
        raise ValueError(f"adapter= must be a peft.LoraConfig or a folder with one, not a {type(config).__name__}")
    usual = LoraConfig()
    if isinstance(config.init_lora_weights, str) and config.init_lora_weights != "gaussian":
        raise ValueError(
            f"LoraConfig(init_lora_weights={config.init_lora_weights!r}) changes the weights below the adapters, which "
            "a pipeline does not: set True or 'gaussian'"
        )
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in _SUPPORTED and value and value != getattr(usual, field.name):
            raise ValueError(
                f"LoraConfig({field.name}={value!r}) is not supported in a pipeline: leave it out; these can be set: "
                f"{', '.join(sorted(_SUPPORTED))}"
            )


def _compare(folder: Path, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Compare names and shapes with the folder's, without reading a weight."""
    with open_weights(folder / WEIGHTS_FILE) as reader:
        found = {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    for name in sorted(expected.keys() | found.keys()):
        if name not in found and _is_embedding(name):
            continue  # save_embedding_layers=False
        if name not in found:
            raise ValueError(f"{folder} holds no {name}, which its {CONFIG_FILE} asks for in this model")
        if name not in expected:
            raise ValueError(f"{folder} holds {name}, which is nothing of this model with its {CONFIG_FILE}")
        if found[name] != expected[name]:
            raise ValueError(
                f"{name} in {folder} has shape {list(found[name])}, but this model and the rank in {CONFIG_FILE} ask "
                f"for {list(expected[name])}: they belong to different models"
            )


def _read_into(folder: Path, targets: Mapping[str, Tensor]) -> None:
    with open_weights(folder / WEIGHTS_FILE) as reader, torch.no_grad():
        for name in targets.keys() & set(reader.keys()):
            targets[name].copy_(reader.get_tensor(name))


def refuse_tied(targets: Iterable[str], ends: Iterable[str]) -> None:
    """Refuse adapters on the ends of a tied embedding.

    Args:
        targets: modules that have adapters.
        ends: embedding and head.

    Raises:
        ValueError: if one is among them.
    """
    found = sorted(set(targets) & set(ends))
    if found:
        raise ValueError(
            f"target_modules matches {found[0]}, which is tied: embedding and head are one weight on two stages, and "
            "an adapter would change only one of them; leave it out (exclude_modules)"
        )
