"""Freezing the first layers of a pipeline, whichever stages they are on."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed.pipe import LayerSpec
from torch import nn

from dynpipe_ds import keep_in_checkpoints
from scenarios.freezing.cache import PrefixCache, cacheable_layers
from scenarios.gpt import GPTConfig
from scenarios.scenario import Engine, Report, Scenario, State

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
        keep_in_checkpoints(layer, _FROZEN_NAMES)
        layer.requires_grad_(False)
    elif not frozen and names is not None:
        for name, parameter in layer.named_parameters():
            if name in names:
                parameter.requires_grad_(True)
        delattr(layer, _FROZEN_NAMES)


def freeze_prefix(engine: Engine, num_frozen: int) -> None:
    """Freeze the model's first layers and unfreeze all others, as far as they are on this stage.

    Args:
        engine: holds the local layers.
        num_frozen: number of leading layers of the whole model.
    """
    for index, layer in engine.local_layers().items():
        set_frozen(layer, index < num_frozen)


@dataclass(kw_only=True)
class FreezingScenario(Scenario):
    """What all freezing rules share: they need untied weights, and report how much is frozen.

    Attributes:
        cache: keep what the frozen prefix puts out and skip its layers when the same batch comes again;
            needs data in an order that repeats (``data.shuffle=once``).
        cache_mib: most mebibytes that a replica of the model keeps for it, on all its stages together.
    """

    cache: bool = False
    cache_mib: int = 1024
    _num_frozen: int = field(init=False, default=0)
    _prefix_cache: PrefixCache | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Refuse settings without a meaning, all problems at once."""
        problems = self.problems()
        if problems:
            raise ValueError("scenario: " + "; ".join(problems))
        if self.cache:
            self._prefix_cache = PrefixCache(budget_bytes=self.cache_mib << 20)

    def problems(self) -> list[str]:
        """List what is wrong with the settings; a rule adds its own."""
        return too_small(self, cache_mib=1)

    @property
    def num_frozen(self) -> int:
        """Leading layers that are frozen now, those that were cut as one."""
        return self._num_frozen

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        """Refuse tied weights, of which one half would freeze; make layers that can be skipped, if asked to."""
        if model.tied:
            raise ValueError(
                "model.tied=true does not go with freezing: the embedding would freeze while the "
                "head, which is the same weight, still trains; set model.tied=false"
            )
        return cacheable_layers(model, layers) if self.cache else layers

    def repeats_after(self, num_batches: int | None) -> None:
        """Refuse a cache where no batch comes again."""
        if self._prefix_cache is None:
            return
        if num_batches is None:
            raise ValueError(
                "scenario.cache=true needs batches that come again, but the data is shuffled anew in every "
                "epoch: set data.shuffle=once"
            )
        self._prefix_cache.period = num_batches

    def freeze(self, engine: Engine, num_frozen: int) -> None:
        """Make the frozen prefix this long, in whole layers, with the same number on every rank."""
        self._num_frozen = num_frozen
        freeze_prefix(engine, self._prefix(engine))
        if self._prefix_cache is not None:
            self._prefix_cache.forget_behind(engine, self._prefix(engine))

    def num_layers(self, engine: Engine) -> int:
        """Count the layers of the model, those that were cut as one."""
        return max(self.whole_layers(engine)) + 1

    def _prefix(self, engine: Engine) -> int:
        """Count the engine's layers that are frozen."""
        return sum(whole < self._num_frozen for whole in self.whole_layers(engine))

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Find out whether the prefix has seen this batch before; a rule calls it once it has frozen."""
        if self._prefix_cache is not None:
            self._prefix_cache.begin(engine, batch, self._prefix(engine))

    def after_batch(self, engine: Engine, batch: int) -> None:
        """Let the layers compute again; a rule calls it before it looks at them."""
        if self._prefix_cache is not None:
            self._prefix_cache.end(engine)

    def report(self, engine: Engine) -> Report:
        """Report the frozen layers, and how many of them were skipped in the last batch."""
        report: Report = {"frozen layers": f"{self._num_frozen} of {self.num_layers(engine)}"}
        if self._prefix_cache is not None:
            report["layers from cache"] = self._prefix_cache.num_skipped
        return report

    def state_dict(self) -> State:
        """Return how much is frozen. What the cache holds is left out: it is computed anew, to the same bits."""
        return {"num_frozen": self._num_frozen}

    def load_state_dict(self, state: State) -> None:
        """Take it back; the layers know themselves whether they are frozen."""
        self._num_frozen = state["num_frozen"]


@dataclass(kw_only=True)
class ConvergenceFreezing(FreezingScenario):
    """What the rules share that look at layers now and then and freeze those that have converged.

    Attributes:
        first_batch: nothing is looked at before this batch.
        evaluate_every: batches between two decisions.
        first_module: leading layers that freeze together, judged by the last of them. By default
            the embedding goes with the first block: a table's answer changes by little from the
            start, but it never stops changing, so it would hold up all others.
        max_frozen: most of the model that may freeze, a fraction of its layers.
    """

    first_batch: int = 6
    evaluate_every: int = 2
    first_module: int = 2
    max_frozen: float = 0.75

    def problems(self) -> list[str]:
        """List numbers that are too small or too large."""
        problems = super().problems() + too_small(self, first_batch=0, evaluate_every=1, first_module=1)
        if not 0 < self.max_frozen < 1:
            problems.append(f"max_frozen={self.max_frozen} must be between 0 and 1")
        return problems

    def limit(self, engine: Engine) -> int:
        """Return how many leading layers may freeze at most; the last layer never does."""
        total = self.num_layers(engine)
        return min(int(self.max_frozen * total), total - 1)


def too_small(settings: object, **least: int) -> list[str]:
    """List the settings that are below a bound, each with value and rule."""
    return [
        f"{name}={getattr(settings, name)} must be at least {bound}"
        for name, bound in least.items()
        if getattr(settings, name) < bound
    ]
