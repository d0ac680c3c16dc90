"""Continual training of a model that brings its experts (Mixtral, LLaMA-MoE): what its routers do."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepspeed.pipe import LayerSpec
from torch import Tensor

from scenarios.moe.scenario import skew
from scenarios.pretrained import PretrainedModel
from scenarios.scenario import AnyModel, Engine, Report, Scenario, gather_by_layer


@dataclass(kw_only=True)
class ContinualTraining(Scenario):
    """Experts that a model folder brings: their load is reported, their load-balancing loss trained.

    Attributes:
        aux_weight: weight of the loss; 0 for none, ``None`` for what the model's ``config.json`` says.
    """

    aux_weight: float | None = 0.01
    _num_experts: int = field(init=False, default=0)
    _load: Tensor | None = field(init=False, default=None)

    any_model = True
    extra_loss = True

    def __post_init__(self) -> None:
        """Refuse a weight without a meaning."""
        if self.aux_weight is not None and self.aux_weight < 0:
            raise ValueError(f"scenario: aux_weight={self.aux_weight} must be 0 or more, or null for the model's own")

    def layers(self, model: AnyModel, layers: list[LayerSpec]) -> list[LayerSpec]:
        """List the model's layers with the loss's weight; raises ``ValueError`` for a model without experts."""
        if not isinstance(model, PretrainedModel) or not model.num_experts:
            raise ValueError(
                "scenario=moe_continual trains a model that brings its experts: set model=hf and model.path to a "
                "Mixtral or LLaMA-MoE, or take scenario=moe"
            )
        self._num_experts = model.num_experts
        return model.layers(router_loss_weight=self.aux_weight)

    def after_batch(self, engine: Engine, batch: int) -> None:
        """Add up what all replicas have routed."""
        from dynpipe_ds.hf import take_expert_load

        loads = {index: take_expert_load(layer) for index, layer in engine.local_layers().items()}
        own = {index: load.tolist() for index, load in loads.items() if load is not None}
        self._load = gather_by_layer(engine, own, self._num_experts)

    def report(self, engine: Engine) -> Report:
        """Report the skew of the last batch.

        Returns:
            ``"busiest expert"``, rows of the fullest expert over the mean, averaged over the layers with experts;
            ``"tokens per expert"``, rows by layer and expert, empty for layers without.
        """
        if self._load is None:
            return {}
        return {
            "busiest expert": f"{skew(self._load):.1f} of mean",
            "tokens per expert": [[int(count) for count in row] if any(row) else [] for row in self._load.tolist()],
        }
