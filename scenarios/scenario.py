"""What a scenario is to the training loop: which layers it trains, what it does between batches.

A scenario changes only layers of its own stage (``engine.local_layers()``), between two batches.
State that belongs to a layer is set as an attribute on that layer and travels when the layer moves;
state of the scenario itself must be the same on every rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from scenarios.gpt import GPTConfig, gpt_layers, loss_fn


class Engine(Protocol):
    """The part of ``DynamicPipelineEngine`` that scenarios use."""

    device: torch.device

    @property
    def partition(self) -> tuple[int, ...]:
        """Boundaries of the stages."""
        ...

    def local_layers(self) -> dict[int, nn.Module]:
        """Global layer index to module, for this stage."""
        ...

    def get_lr(self) -> list[float]:
        """Learning rates of the optimizer's parameter groups."""
        ...


class Scenario:
    """A model that does not change; the base of all scenarios.

    A subclass takes its settings as keyword arguments and overrides what it needs. All methods are
    called on every rank, so they may use collectives.
    """

    def layers(self, model: GPTConfig) -> list[LayerSpec]:
        """Build the layer list, and refuse settings that do not fit the model (``ValueError``)."""
        return gpt_layers(model)

    def loss_fn(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of (output of the last layer, labels)."""
        return loss_fn

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Act on the local layers before batch ``batch`` (counted from 0) is trained."""

    def after_batch(self, engine: Engine, batch: int) -> None:
        """Act on the local layers after batch ``batch`` was trained."""

    def report(self, engine: Engine) -> dict[str, float | int | str]:
        """Say in a few named values what the scenario has done so far, the same on every rank.

        Called after every batch; a changed value is printed, the last ones stand in the table.
        """
        return {}


_SCENARIOS: dict[str, str | type[Scenario]] = {
    "none": Scenario,
    "freezing": "scenarios.freezing:ScheduledFreezing",
    "freezing_egeria": "scenarios.freezing:EgeriaFreezing",
}


def register_scenario(name: str, scenario: type[Scenario]) -> None:
    """Make a scenario available by name.

    Args:
        name: what ``scenario.name`` says.
        scenario: the class; built with the other keys of the configuration as keyword arguments.

    Raises:
        ValueError: if the name is taken.
    """
    if name in _SCENARIOS:
        raise ValueError(f"a scenario named {name!r} exists already: choose another name")
    _SCENARIOS[name] = scenario


def scenario_names() -> tuple[str, ...]:
    """List the registered names, sorted."""
    return tuple(sorted(_SCENARIOS))


def build_scenario(name: str, settings: Mapping[str, Any]) -> Scenario:
    """Build a scenario from its name and settings.

    Args:
        name: a registered name, or ``"package.module:Class"`` for a class that is not registered.
        settings: keyword arguments of the class.

    Raises:
        ValueError: if there is no such scenario or it does not take these settings.
    """
    target = _SCENARIOS.get(name, name)
    if isinstance(target, str):
        target = _import(target)
    try:
        return target(**settings)
    except TypeError as error:
        raise ValueError(f"scenario {name!r} does not take these settings: {error}") from error


def _import(target: str) -> type[Scenario]:
    module, _, attribute = target.partition(":")
    if not attribute:
        raise ValueError(
            f"there is no scenario {target!r}: choose one of {', '.join(scenario_names())}, or "
            "name a class as 'package.module:Class'"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"scenario {target!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Scenario)):
        raise ValueError(f"scenario {target!r} must be a subclass of scenarios.scenario.Scenario")
    return found
