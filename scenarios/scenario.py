"""What a scenario is to the training loop: which layers it trains, what it does between batches.

A scenario changes only layers of its own stage (``engine.local_layers()``), between two batches.
State that belongs to a layer is set as an attribute on that layer and travels when the layer moves;
state of the scenario itself must be the same on every rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from dynpipe_ds import ParameterReplacement, PipelineProfile, split_layers, whole_layers
from scenarios.checking import type_problems
from scenarios.gpt import Activation, GPTConfig, gpt_layers, loss_fn
from scenarios.pretrained import PretrainedModel

# What a scenario reports: plain values, and lists of them (by layer, say).
Report = dict[str, Any]
# What a scenario keeps in checkpoints: plain values and tensors.
State = dict[str, Any]

AnyModel = GPTConfig | PretrainedModel


class Engine(Protocol):
    """The part of ``DynamicPipelineEngine`` that scenarios use."""

    device: torch.device
    mpu: Any  # DeepSpeed's grid: get_data_parallel_group(), get_pipe_parallel_group(), …

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

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches a batch."""
        ...

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """What the model computes in, and what gradients are summed in."""
        ...

    @property
    def last_batch_profile(self) -> PipelineProfile | None:
        """The newest profile."""
        ...

    def expect_change(self) -> None:
        """Let layers be measured anew, since they will take other times from now on; the same on every rank."""
        ...

    def replace_parameters(self, replacements: Sequence[ParameterReplacement]) -> None:
        """Give layers parameters of another shape, with their optimizer state; collective."""
        ...


class Scenario:
    """A model that does not change; the base of all scenarios.

    A subclass takes its settings as keyword arguments and overrides what it needs. All methods are
    called on every rank, so they may use collectives.

    Attributes:
        extra_loss: whether its layers add to the loss (see ``scenarios.gpt.add_extra_loss``).
        any_model: whether it also fits layers that are not the shared GPT's: it replaces none of them.
    """

    extra_loss: bool = False
    any_model: bool = False
    _whole_layers: Sequence[int] | None = None

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        """Change the layer list, and refuse settings that do not fit the model (``ValueError``).

        Args:
            model: the model's size and kind.
            layers: its layers, as ``gpt_layers`` lists them or as another scenario has changed them.

        Returns:
            The layers to train.
        """
        return layers

    def cut_into(self, whole_layers: Sequence[int]) -> None:
        """Take note of how the layers were cut into parts; called once, when they have been listed.

        Args:
            whole_layers: for each layer of the engine the index, among those that :meth:`layers` has listed, of
                the one that it is, or is a part of.
        """
        self._whole_layers = whole_layers

    def whole_layers(self, engine: Engine) -> Sequence[int]:
        """For each layer of the engine the index of the one that it is, or is a part of: what a scenario counts in."""
        return range(engine.partition[-1]) if self._whole_layers is None else self._whole_layers

    def loss_fn(self) -> Callable[[Activation, Tensor], Tensor]:
        """Return the loss of (output of the last layer, labels)."""
        return loss_fn

    def check_replicas(self, num_replicas: int) -> None:
        """Refuse settings that do not fit the number of data-parallel replicas (``ValueError``); called before layers
        are built.

        Args:
            num_replicas: of each stage.
        """

    def repeats_after(self, num_batches: int | None) -> None:
        """Take note of how the data repeats; called once, before the first batch.

        Args:
            num_batches: after how many batches the same ones come again, sample by sample in the same
                order; ``None`` if they never do.
        """

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Act on the local layers before batch ``batch`` (counted from 0) is trained."""

    def after_batch(self, engine: Engine, batch: int) -> None:
        """Act on the local layers after batch ``batch`` was trained."""

    def report(self, engine: Engine) -> Report:
        """Say in named values what the scenario has done so far, the same on every rank.

        Called after every batch and written to ``results.json``. Numbers and short texts are printed when
        a window ends and they have changed, and the last ones stand in the table; lists (a value a layer,
        say) are only written.
        """
        return {}

    def state_dict(self) -> State:
        """Return what a run that is continued must know and layers do not hold; it is kept in checkpoints.

        Plain values and tensors, the same on every rank. What belongs to a layer is kept with that layer: by its
        ``state_dict``, or by ``dynpipe_ds.keep_in_checkpoints``.
        """
        return {}

    def load_state_dict(self, state: State) -> None:
        """Take back what :meth:`state_dict` gave, after the layers were loaded and before the next batch.

        Args:
            state: as stored, maybe with another number of stages or replicas.
        """


def build_layers(scenario: Scenario, model: AnyModel) -> list[LayerSpec]:
    """List the layers of a scenario's model; raises ``ValueError`` where its settings do not fit."""
    layers = _listed(scenario, model)
    if model.split_blocks is True:
        layers = split_layers(layers)
    scenario.cut_into(whole_layers(layers))
    return layers


def can_split_blocks(scenario: Scenario, model: AnyModel) -> bool:
    """Whether any layer of a scenario's model can be cut."""
    try:
        split_layers(_listed(scenario, model))
    except ValueError:
        return False
    return True


def _listed(scenario: Scenario, model: AnyModel) -> list[LayerSpec]:
    if isinstance(model, PretrainedModel):
        if type(scenario) is not Scenario and not scenario.any_model:
            raise ValueError(
                f"{type(scenario).__name__} changes the blocks of the shared GPT, which model=hf does not have: choose "
                "another model, or scenario=none, freezing or moe_continual"
            )
        return scenario.layers(model, model.layers())
    return scenario.layers(model, gpt_layers(model, extra_loss=scenario.extra_loss))


def gather_by_layer(engine: Engine, values: Mapping[int, Sequence[float]], width: int) -> Tensor:
    """Put together what every rank knows of its own layers; collective over all ranks.

    Args:
        engine: knows how many layers there are.
        values: ``width`` numbers for each local layer that has some.
        width: numbers a layer, the same on every rank.

    Returns:
        ``[layers, width]`` of float64 on the CPU, the same on every rank: sums over the replicas of a
        layer's stage, 0 where no rank gave a value.
    """
    table = torch.zeros(engine.partition[-1], width, dtype=torch.float64)
    for layer, row in values.items():
        table[layer] = torch.tensor(row, dtype=torch.float64)
    if dist.is_initialized():
        table = table.to(engine.device)
        dist.all_reduce(table)
    return table.cpu()


_SCENARIOS: dict[str, str | type[Scenario]] = {
    "none": Scenario,
    "combined": "scenarios.combined:Combined",
    "mod_moe": "scenarios.combined:Combined",
    "pruning_freezing": "scenarios.combined:Combined",
    "pruning": "scenarios.pruning:Pruning",
    "freezing": "scenarios.freezing:ScheduledFreezing",
    "freezing_egeria": "scenarios.freezing:EgeriaFreezing",
    "freezing_autofreeze": "scenarios.freezing:AutoFreeze",
    "early_exit": "scenarios.early_exit:EarlyExit",
    "early_exit_adpc": "scenarios.early_exit:EarlyExit",
    "moe": "scenarios.moe:MixtureOfExperts",
    "moe_continual": "scenarios.moe.continual:ContinualTraining",
    "mod": "scenarios.mod:MixtureOfDepths",
    "sparse_attention": "scenarios.sparse_attention:SparseAttention",
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
    wrong = type_problems("scenario", target, settings)
    try:
        scenario = target(**settings)
    except TypeError as error:
        wrong = wrong or [str(error)]
    except ValueError as error:
        if not wrong:
            raise
        told = {problem.partition("=")[0].removeprefix("scenario.") for problem in wrong}
        further = str(error).removeprefix("scenario: ").split("; ")
        wrong += [problem for problem in further if problem.partition("=")[0] not in told]
    if wrong:
        raise ValueError(f"scenario {name!r} does not take these settings: {'; '.join(wrong)}")
    return scenario


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
