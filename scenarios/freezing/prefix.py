"""Freezing the first layers of a pipeline, whichever stages they are on."""

from __future__ import annotations

from deepspeed.pipe import LayerSpec
from torch import nn

from scenarios.gpt import GPTConfig
from scenarios.scenario import Engine, Scenario

# Set on a frozen layer; travels with it. Names the parameters that freezing has switched off, so
# that unfreezing does not switch on what the user had frozen (the base weights under LoRA, say).
_FROZEN_NAMES = "frozen_parameter_names"


def set_frozen(layer: nn.Module, frozen: bool) -> None:
    """Freeze or unfreeze a layer; does nothing when it is so already.

    Args:
        layer: a live layer of this stage.
        frozen: ``False`` gives back ``requires_grad`` to exactly the parameters that freezing
            took it from.
    """
    names = getattr(layer, _FROZEN_NAMES, None)
    if frozen and names is None:
        names = tuple(name for name, p in layer.named_parameters() if p.requires_grad)
        setattr(layer, _FROZEN_NAMES, names)
        layer.requires_grad_(False)
    elif not frozen and names is not None:
        parameters = dict(layer.named_parameters())
        for name in names:
            parameters[name].requires_grad_(True)
        delattr(layer, _FROZEN_NAMES)


def freeze_prefix(engine: Engine, num_frozen: int) -> None:
    """Freeze the model's first layers and unfreeze all others, as far as they are on this stage.

    Args:
        engine: holds the local layers.
        num_frozen: number of leading layers of the whole model.
    """
    for index, layer in engine.local_layers().items():
        set_frozen(layer, index < num_frozen)


class FreezingScenario(Scenario):
    """What both freezing rules share: they need untied weights, and report how much is frozen."""

    _num_frozen: int = 0

    @property
    def num_frozen(self) -> int:
        """Leading layers that are frozen now."""
        return self._num_frozen

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        """Leave the layers as they are; refuse tied weights, of which one half would freeze."""
        if model.tied:
            raise ValueError(
                "model.tied=true does not go with freezing: the embedding would freeze while the "
                "head, which is the same weight, still trains; set model.tied=false"
            )
        return layers

    def report(self, engine: Engine) -> dict[str, float | int | str]:
        """Report the frozen layers."""
        return {"frozen layers": f"{self._num_frozen} of {engine.partition[-1]}"}
