"""Two dynamisms at once: scenarios that act one after the other on the same layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.pipe import LayerSpec

from scenarios.gpt import GPTConfig
from scenarios.scenario import Engine, Report, Scenario, State, build_scenario


class Combined(Scenario):
    """Several scenarios in the order in which they are listed.

    Args:
        parts: settings of each, with its ``name`` among them, by any key.

    Raises:
        ValueError: if there is none, or one has settings it does not take.
    """

    def __init__(self, parts: Mapping[str, Mapping[str, Any]]) -> None:
        if not parts:
            raise ValueError("scenario.parts is empty: name at least one scenario")
        self.parts: list[Scenario] = []
        for key, part in parts.items():
            settings = dict(part)
            name = settings.pop("name", key)
            self.parts.append(build_scenario(str(name), settings))
        self.extra_loss = any(part.extra_loss for part in self.parts)
        self.any_model = all(part.any_model for part in self.parts)

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        """Let each part change what the ones before it have made."""
        for part in self.parts:
            layers = part.layers(model, layers)
        return layers

    def cut_into(self, whole_layers: Sequence[int]) -> None:
        """Let each part know."""
        for part in self.parts:
            part.cut_into(whole_layers)

    def check_replicas(self, num_replicas: int) -> None:
        """Let each part object."""
        for part in self.parts:
            part.check_replicas(num_replicas)

    def repeats_after(self, num_batches: int | None) -> None:
        """Let each part know."""
        for part in self.parts:
            part.repeats_after(num_batches)

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Let each part act."""
        for part in self.parts:
            part.before_batch(engine, batch)

    def after_batch(self, engine: Engine, batch: int) -> None:
        """Let each part act."""
        for part in self.parts:
            part.after_batch(engine, batch)

    def report(self, engine: Engine) -> Report:
        """Put the parts' reports together."""
        report: Report = {}
        for part in self.parts:
            report.update(part.report(engine))
        return report

    def state_dict(self) -> State:
        """Return the parts' states, in their order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: State) -> None:
        """Give each part its own."""
        for part, own in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(own)
