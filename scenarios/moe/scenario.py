"""Mixture of experts as a scenario: which blocks have experts, what is counted, and the bias that balances."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn

from scenarios.gpt import Block, GPTConfig
from scenarios.kernels import in_use
from scenarios.moe.balancing import ExpertBalancing, Placement, placement_problems
from scenarios.moe.layer import ExpertConfig, MoEBlock, MoEMLP, Routing, Weights
from scenarios.moe.parallel import expert_group, expert_ranges, set_expert_group
from scenarios.moe.sharded import cant_divide
from scenarios.scenario import Engine, Report, Scenario, State, gather_by_layer


def moe_mlps(layer: nn.Module) -> Iterator[MoEMLP]:
    """Find the experts in a layer, however deep another scenario has wrapped them."""
    return (module for module in layer.modules() if isinstance(module, MoEMLP))


@dataclass(kw_only=True)
class MixtureOfExperts(Scenario):
    """Experts in the place of the MLP of some blocks.

    Attributes:
        dense_blocks: leading blocks that keep their MLP: a number, or a fraction of all blocks below 1.
        every: of the blocks after them, every how many-th gets experts.
        num_experts: see :class:`~scenarios.moe.layer.ExpertConfig`, as for the following.
        top_k: experts a token.
        routing: how tokens find experts.
        capacity_factor: most tokens of an expert over an equal share; ``None`` for dropless.
        aux_weight: weight of the load-balancing loss.
        bias_rate: step of the bias, for ``"loss_free"``.
        sinkhorn_iterations: for ``"s_base"``.
        expert_parallel: whether data-parallel ranks share the experts; without it each computes all of them.
        expert_weights: ``"replicated"`` or ``"sharded"``; see :class:`~scenarios.moe.layer.ExpertConfig`.
        placement: which rank computes which tokens, for sharded experts: ``"static"``, each expert at home;
            ``"local"``, each token on its own rank; ``"fastermoe"``, ``"pro_prophet"`` and ``"lanes"``, planned.
        plan_every: batches between two plans.
        max_copies: most experts of others that a rank may hold for a batch; ``None``: any number.
    """

    dense_blocks: int | float = 0
    every: int = 2
    num_experts: int = 8
    top_k: int = 2
    routing: Routing = "token_choice"
    capacity_factor: float | None = None
    aux_weight: float = 0.01
    bias_rate: float = 0.001
    sinkhorn_iterations: int = 8
    expert_parallel: bool = True
    expert_weights: Weights = "replicated"
    placement: Placement = "static"
    plan_every: int = 10
    max_copies: int | None = None
    experts: ExpertConfig = field(init=False)
    _sizes: tuple[int, ...] = field(init=False, default=())
    _load: Tensor | None = field(init=False, default=None)
    _balancing: ExpertBalancing | None = field(init=False, default=None)

    extra_loss = True

    def __post_init__(self) -> None:
        """Refuse settings without a meaning, all problems at once."""
        own = {setting.name: getattr(self, setting.name) for setting in fields(ExpertConfig)}
        self.experts = ExpertConfig(**own)
        problems = self.experts.problems()
        if self.dense_blocks < 0 or (isinstance(self.dense_blocks, float) and self.dense_blocks >= 1):
            problems.append(
                f"dense_blocks={self.dense_blocks} must be a number of blocks (0, 1, 2, …) or a fraction in [0.0, 1.0)"
            )
        if self.every < 1:
            problems.append(f"every={self.every} must be at least 1")
        problems += placement_problems(
            self.placement, sharded=self.expert_weights == "sharded", plan_every=self.plan_every,
            max_copies=self.max_copies,
        )  # fmt: skip
        if self.expert_weights == "sharded" and not self.expert_parallel:
            problems.append(
                "expert_parallel=false lets each rank compute all experts, and expert_weights=sharded gives it a share "
                "of them: set expert_parallel=true, with placement=local for tokens that stay where they are"
            )
        if problems:
            raise ValueError("scenario: " + "; ".join(problems))

    def check_replicas(self, num_replicas: int) -> None:
        """Refuse experts that replicas can't share out evenly."""
        if self.expert_weights == "sharded" and self.num_experts % num_replicas:
            raise ValueError("scenario: " + cant_divide(self.num_experts, num_replicas))
        if self._balancing is not None:
            self._balancing.check_replicas(num_replicas)

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        """Give the chosen plain blocks experts; raises ``ValueError`` when there is none to choose."""
        plain = [index for index, spec in enumerate(layers) if spec.typename is Block]
        dense = self.dense_blocks
        first = round(dense * len(plain)) if isinstance(dense, float) else dense
        chosen = plain[first:][self.every - 1 :: self.every]
        if not chosen:
            raise ValueError(
                f"scenario.dense_blocks={dense} and scenario.every={self.every} leave none of the {len(plain)} "
                "plain blocks for experts: lower them"
            )
        self._sizes = hidden, width = model.hidden, model.mlp_ratio * model.hidden
        if self.expert_weights == "sharded":
            self._balancing = ExpertBalancing(
                self.num_experts, [(width, hidden), (hidden, width)], self.placement, plan_every=self.plan_every,
                max_copies=self.max_copies,
            )  # fmt: skip
        return [
            LayerSpec(MoEBlock, model, self.experts) if index in chosen else spec for index, spec in enumerate(layers)
        ]

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Tell the layers which ranks share the experts; it holds until told otherwise."""
        shared = self.expert_parallel and torch.distributed.is_initialized()
        set_expert_group(engine.mpu.get_data_parallel_group() if shared else None)
        if self._balancing is not None:
            self._balancing.before_batch(engine)

    def after_batch(self, engine: Engine, batch: int) -> None:
        """Add up what all replicas have routed, and let the bias follow (DeepSeek-V3, section 2.1.2)."""
        own = {}
        for index, layer in engine.local_layers().items():
            loads = [load for mlp in moe_mlps(layer) if (load := mlp.take_load()) is not None]
            if loads:
                own[index] = torch.stack(loads).sum(0).tolist()
        self._load = gather_by_layer(engine, own, 2 * self.num_experts + 2)
        if self._balancing is not None:
            self._balancing.after_batch(engine)
        if self.routing != "loss_free":
            return
        for index, layer in engine.local_layers().items():
            wanted = self._load[index, self.num_experts : -2]
            steps = (wanted.mean() - wanted).sign().to(torch.int32)
            for mlp in moe_mlps(layer):
                mlp.bias_steps += steps.to(mlp.bias_steps.device)

    def state_dict(self) -> State:
        """Where experts are placed."""
        return {} if self._balancing is None else {"experts": self._balancing.state_dict()}

    def load_state_dict(self, state: State) -> None:
        """Go on with the placements of a run that was stopped."""
        if self._balancing is not None and "experts" in state:
            self._balancing.load_state_dict(state["experts"])

    def report(self, engine: Engine) -> Report:
        """Report skew and dropped tokens of the last batch.

        Returns:
            ``"busiest expert"``, rows that want the fullest expert over the mean, averaged over the layers with
            experts; ``"busiest rank"``, the same of rows computed by ranks that share experts; ``"dropped"``,
            percentage of routed pairs over capacity, or of tokens that no expert chose; ``"kernel"``;
            ``"tokens per expert"``, rows computed by layer and expert, empty for layers without.
        """
        if self._load is None:
            return {}
        routed = self._load[self._load[:, -1] > 0]
        if not len(routed):
            return {}
        counts, wanted = self._load[:, : self.num_experts], routed[:, self.num_experts : -2]
        dropped = routed[:, -2].sum() / routed[:, -1].sum()
        report: Report = {
            "busiest expert": f"{skew(wanted):.1f} of mean",
            "dropped": f"{100 * float(dropped):.0f}%",
            "kernel": in_use("experts", engine, *self._sizes),
            "tokens per expert": [
                [int(count) for count in row] if offered else []
                for row, offered in zip(counts.tolist(), self._load[:, -1].tolist(), strict=True)
            ],
        }
        if self._balancing is not None:
            return report | self._balancing.report()
        group = expert_group()
        if group is not None:
            ranges = expert_ranges(self.num_experts, torch.distributed.get_world_size(group))
            by_rank = [routed[:, experts.start : experts.stop].sum(1) for experts in ranges]
            report["busiest rank"] = f"{skew(torch.stack(by_rank, dim=1)):.2f} of mean"
        return report


def skew(load: Tensor) -> float:
    """Largest over mean of each row's values, averaged over the rows that have any load."""
    load = load[load.sum(1) > 0]
    return float((load.max(dim=1).values / load.mean(dim=1)).mean()) if len(load) else 1.0
