"""A scenario whose blocks add to the loss, to be routed by Mixture of Depths."""

from __future__ import annotations

from deepspeed.pipe import LayerSpec
from torch import Tensor

from scenarios.gpt import MLP, Block, GPTConfig, add_extra_loss
from scenarios.scenario import Scenario


class AddingMLP(MLP):
    """An MLP that adds the mean square of its input to the loss, as far as it is computed."""

    def forward(self, x: Tensor) -> Tensor:
        add_extra_loss(self, 0.01 * x.float().pow(2).mean())
        return super().forward(x)


class AddingBlock(Block):
    """A block with that MLP."""

    def make_mlp(self, config: GPTConfig) -> AddingMLP:
        return AddingMLP(config)


class Adding(Scenario):
    """A model of such blocks."""

    extra_loss = True

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        return [LayerSpec(AddingBlock, model) if spec.typename is Block else spec for spec in layers]
