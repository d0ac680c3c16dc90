"""Continual training of a model that brings its experts (Mixtral, LLaMA-MoE): what its routers do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

from deepspeed.pipe import LayerSpec
from torch import Tensor

from scenarios.moe.balancing import ExpertBalancing, Placement, placement_problems
from scenarios.moe.layer import Weights
from scenarios.moe.scenario import skew
from scenarios.moe.sharded import cant_divide
from scenarios.moe.stacks import SharedStacks
from scenarios.pretrained import PretrainedModel
from scenarios.scenario import AnyModel, Engine, Report, Scenario, State, gather_by_layer


@dataclass(kw_only=True)
class ContinualTraining(Scenario):
    """Experts that a model folder brings: their load is reported, their load-balancing loss trained.

    Attributes:
        aux_weight: weight of the loss; 0 for none, ``None`` for what the model's ``config.json`` says.
        expert_weights: ``"replicated"``, each replica of a stage holds all experts, or ``"sharded"``, an equal share.
        placement: which rank computes which tokens, for sharded experts; as in
            :class:`~scenarios.moe.scenario.MixtureOfExperts`, as for the following.
        plan_every: batches between two plans.
        max_copies: most experts of others that a rank may hold for a batch; ``None``: any number.
    """

    aux_weight: float | None = 0.01
    expert_weights: Weights = "replicated"
    placement: Placement = "static"
    plan_every: int = 10
    max_copies: int | None = None
    _num_experts: int = field(init=False, default=0)
    _load: Tensor | None = field(init=False, default=None)
    _balancing: ExpertBalancing | None = field(init=False, default=None)

    any_model = True
    extra_loss = True

    def __post_init__(self) -> None:
        """Refuse settings without a meaning, all problems at once."""
        problems = []
        if self.aux_weight is not None and self.aux_weight < 0:
            problems.append(f"aux_weight={self.aux_weight} must be 0 or more, or null for the model's own")
        if self.expert_weights not in get_args(Weights):
            problems.append(f"expert_weights={self.expert_weights!r} must be one of {', '.join(get_args(Weights))}")
        problems += placement_problems(
            self.placement, sharded=self.is_sharded, plan_every=self.plan_every, max_copies=self.max_copies
        )
        if problems:
            raise ValueError("scenario: " + "; ".join(problems))

    @property
    def is_sharded(self) -> bool:
        """Whether replicas share the experts out."""
        return self.expert_weights == "sharded"

    def layers(self, model: AnyModel, layers: list[LayerSpec]) -> list[LayerSpec]:
        """List the model's layers with the loss's weight; raises ``ValueError`` for a model without experts."""
        if not isinstance(model, PretrainedModel) or not model.num_experts:
            raise ValueError(
                "scenario=moe_continual trains a model that brings its experts: set model=hf and model.path to a "
                "Mixtral or LLaMA-MoE, or take scenario=moe"
            )
        self._num_experts = model.num_experts
        if self.is_sharded and model.adapters is not None:
            raise ValueError(
                f"model.lora trains {model.adapters} and leaves experts as they are, so replicas can't share their "
                "training out: set scenario.expert_weights=replicated"
            )
        if self.is_sharded:
            self._balancing = self._balancing_of(model)
        return model.layers(router_loss_weight=self.aux_weight, experts=SharedStacks if self.is_sharded else None)

    def check_replicas(self, num_replicas: int) -> None:
        """Refuse experts that replicas can't share out evenly."""
        if self.is_sharded and self._num_experts % num_replicas:
            raise ValueError("scenario: " + cant_divide(self._num_experts, num_replicas))
        if self._balancing is not None:
            self._balancing.check_replicas(num_replicas)

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Say who computes which tokens."""
        if self._balancing is not None:
            self._balancing.before_batch(engine)

    def after_batch(self, engine: Engine, batch: int) -> None:
        """Add up what all replicas have routed."""
        from dynpipe_ds.hf import take_expert_load

        loads = {index: take_expert_load(layer) for index, layer in engine.local_layers().items()}
        own = {index: load.tolist() for index, load in loads.items() if load is not None}
        self._load = gather_by_layer(engine, own, self._num_experts)
        if self._balancing is not None:
            self._balancing.after_batch(engine)

    def state_dict(self) -> State:
        """Where experts are placed."""
        return {} if self._balancing is None else {"experts": self._balancing.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Go on with the placements of a run that was stopped."""
        if self._balancing is not None and "experts" in state:
            self._balancing.load_state_dict(state["experts"])

    def report(self, engine: Engine) -> Report:
        """Report the skew of the last batch.

        Returns:
            ``"busiest expert"``, rows of the fullest expert over the mean, averaged over the layers with experts;
            ``"tokens per expert"``, rows by layer and expert, empty for layers without; for sharded experts what
            :meth:`~scenarios.moe.balancing.ExpertBalancing.report` says.
        """
        if self._load is None:
            return {}
        report: Report = {
            "busiest expert": f"{skew(self._load):.1f} of mean",
            "tokens per expert": [[int(count) for count in row] if any(row) else [] for row in self._load.tolist()],
        }
        return report if self._balancing is None else report | self._balancing.report()

    def _balancing_of(self, model: PretrainedModel) -> ExpertBalancing:
        uneven = next((widths for widths in model.expert_widths() if len(set(widths)) > 1), None)
        if uneven is not None:
            raise ValueError(
                "scenario.expert_weights=sharded needs experts of one width, and the model's size_experts are "
                f"{uneven} in a block: set expert_weights=replicated"
            )
        width, hidden = model.expert_widths()[0][0], int(model.config.hidden_size)
        return ExpertBalancing(
            self._num_experts, [(2 * width, hidden), (hidden, width)], self.placement, plan_every=self.plan_every,
            max_copies=self.max_copies,
        )  # fmt: skip
