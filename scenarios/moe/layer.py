"""A block whose MLP is a router and experts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynpipe_ds import CountedForwards, building_replica
from scenarios.gpt import INIT_STD, Block, GPTConfig, add_extra_loss
from scenarios.moe.experts import add_rows, run_experts, take_rows
from scenarios.moe.parallel import expert_group, from_experts, plan_exchange, to_experts
from scenarios.moe.routing import (
    Assignment,
    balanced,
    capacity_of,
    expert_choice,
    load_balancing_loss,
    sinkhorn,
    token_choice,
)
from scenarios.moe.sharded import LaneProducts, SharedExperts, keep_own_rows

Routing = Literal["token_choice", "loss_free", "s_base", "expert_choice"]
Weights = Literal["replicated", "sharded"]


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Number of experts and how tokens find them.

    Attributes:
        num_experts: ``E``, each as large as the dense MLP.
        top_k: experts a token ``K``; under ``"expert_choice"`` the mean of it.
        routing: ``"token_choice"`` (Switch, Mixtral), ``"loss_free"`` (the same choice by biased scores,
            DeepSeek-V3), ``"s_base"`` (balanced by Sinkhorn) or ``"expert_choice"``.
        capacity_factor: most tokens of an expert over an equal share; ``None`` for dropless. S-BASE has 1 by its
            nature; for expert choice it is how many tokens an expert takes, ``None`` for 1.
        aux_weight: weight of the load-balancing loss of the two token choices.
        bias_rate: step of the bias, for ``"loss_free"``.
        sinkhorn_iterations: for ``"s_base"``.
        expert_weights: ``"replicated"``, each replica of a stage holds all experts, or ``"sharded"``, an equal share.
    """

    num_experts: int = 8
    top_k: int = 2
    routing: Routing = "token_choice"
    capacity_factor: float | None = None
    aux_weight: float = 0.01
    bias_rate: float = 0.001
    sinkhorn_iterations: int = 8
    expert_weights: Weights = "replicated"

    def problems(self) -> list[str]:
        """List what is wrong with the settings."""
        problems = []
        if self.num_experts < 1:
            problems.append(f"num_experts={self.num_experts} must be at least 1")
        elif not 1 <= self.top_k <= self.num_experts:
            problems.append(f"top_k={self.top_k} must be between 1 and num_experts={self.num_experts}")
        if self.routing not in get_args(Routing):
            problems.append(f"routing={self.routing!r} must be one of {', '.join(get_args(Routing))}")
        if self.capacity_factor is not None and not 0 <= self.capacity_factor < math.inf:
            problems.append(f"capacity_factor={self.capacity_factor} must be 0 or more, or null for dropless")
        if self.routing == "s_base" and (self.top_k != 1 or self.capacity_factor is not None):
            problems.append(
                f"routing=s_base gives a token one expert and an expert an equal share: set top_k=1 (it is "
                f"{self.top_k}) and capacity_factor=null (it is {self.capacity_factor})"
            )
        if self.aux_weight < 0:
            problems.append(f"aux_weight={self.aux_weight} must be 0 or more")
        if self.bias_rate <= 0:
            problems.append(f"bias_rate={self.bias_rate} must be positive")
        if self.expert_weights not in get_args(Weights):
            problems.append(f"expert_weights={self.expert_weights!r} must be one of {', '.join(get_args(Weights))}")
        if self.sinkhorn_iterations < 1:
            problems.append(f"sinkhorn_iterations={self.sinkhorn_iterations} must be at least 1")
        return problems


class MoEMLP(SharedExperts):
    """Experts in the place of an MLP, and the router that chooses among them.

    Args:
        config: the model's size and kind.
        experts: number of experts and how tokens find them.

    Attributes:
        bias_steps: by how many steps of ``bias_rate`` the choice of each expert is favoured, int32 ``[E]`` (for
            ``"loss_free"``). Whole numbers, so that the bias is exact in bf16 models as well.
        load: what was routed in training since :meth:`take_load`, or ``None``.
        is_sharded: whether this replica holds a share of the experts, ``E/R`` of them, and not all.
    """

    bias_steps: Tensor

    def __init__(self, config: GPTConfig, experts: ExpertConfig) -> None:
        super().__init__()
        self.config = experts
        width, num_experts = config.mlp_ratio * config.hidden, experts.num_experts
        self.router = nn.Linear(config.hidden, num_experts, bias=False)
        nn.init.normal_(self.router.weight, std=INIT_STD)
        self.up = nn.Parameter(torch.randn(num_experts, width, config.hidden) * INIT_STD)
        self.down = nn.Parameter(torch.randn(num_experts, config.hidden, width))
        self.down.data *= INIT_STD / math.sqrt(2 * config.depth)
        replica = building_replica()
        self.is_sharded = experts.expert_weights == "sharded" and replica.count > 1
        if self.is_sharded:
            keep_own_rows(self, ("up", "down"), replica)
        if experts.routing == "loss_free":
            self.register_buffer("bias_steps", torch.zeros(num_experts, dtype=torch.int32))
        self.load: Tensor | None = None
        self._counted = CountedForwards()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., hidden]`` to the same shape; all leading dimensions are tokens of one pool.

        Collective over the ranks that share the experts, if any (see ``scenarios.moe.parallel``).
        """
        tokens = x.reshape(-1, x.shape[-1])
        # Scores decide, so they are float32 whatever the model's dtype (Switch Transformer, section 2.4).
        logits = F.linear(tokens.float(), self.router.weight.float())
        assignment = self.route(logits)
        self._note(assignment)
        return self.compute(tokens, assignment).view_as(x)

    def route(self, logits: Tensor) -> Assignment:
        """Assign tokens to experts, and add the load-balancing loss if there is one.

        Args:
            logits: the router's scores, float32 ``[T, E]``.
        """
        config = self.config
        if config.routing == "expert_choice":
            factor = 1.0 if config.capacity_factor is None else config.capacity_factor
            return expert_choice(logits.softmax(dim=1), capacity=self._capacity(len(logits), factor))
        if config.routing == "s_base":
            return self._choose(logits.softmax(dim=1), self._balanced(logits)[:, None])
        if config.routing == "loss_free":
            scores = logits.sigmoid()
            chosen = (scores.detach() + config.bias_rate * self.bias_steps).topk(config.top_k, dim=1).indices
            probabilities = scores / scores.sum(dim=1, keepdim=True)
        else:
            scores = probabilities = logits.softmax(dim=1)
            chosen = scores.topk(config.top_k, dim=1).indices
        assignment = self._choose(scores, chosen)
        if self.training and config.aux_weight:
            loss = load_balancing_loss(probabilities, assignment.wanted, top_k=config.top_k)
            add_extra_loss(self, config.aux_weight * loss)
        return assignment

    def compute(self, tokens: Tensor, assignment: Assignment) -> Tensor:
        """Run the experts and add up their weighted answers.

        Args:
            tokens: ``[T, hidden]``.
            assignment: which expert computes which token.

        Returns:
            ``[T, hidden]``; 0 for tokens that no expert computes.
        """
        rows = take_rows(tokens, assignment.token)
        group = expert_group()
        if self.is_sharded:
            rows = self.run_shared(rows, assignment.counts)
        elif group is None:
            experts = range(self.config.num_experts)
            rows = run_experts(rows, assignment.counts, self.up, self.down, experts=experts)
        else:
            exchange = plan_exchange(assignment.counts, group)
            rows = to_experts(rows, exchange)
            rows = run_experts(rows, exchange.counts, self.up, self.down, experts=exchange.experts)
            rows = from_experts(rows, exchange)
        return add_rows(rows * assignment.gate[:, None].to(rows.dtype), assignment.token, len(tokens))

    def expert_weights(self) -> dict[str, nn.Parameter]:
        """This replica's own weights of experts, by name; empty if it has all of them."""
        return {"up": self.up, "down": self.down} if self.is_sharded else {}

    def run_lanes(self, rows: Tensor, lanes: LaneProducts) -> Tensor:
        """Compute the rows of this rank's lanes.

        Args:
            rows: lane by lane, ``[N, hidden]``.
            lanes: multiplies each with its expert's weights.

        Returns:
            ``[N, hidden]``.
        """
        return lanes.mlp(rows, "up", "down")

    def drop_gradients(self) -> None:
        """Forget a batch that all ranks drop, with what was counted in it."""
        self.load, self._counted = None, CountedForwards()
        super().drop_gradients()

    def take_load(self) -> Tensor | None:
        """Return what was routed since the last call, and start anew.

        Returns:
            int64 ``[2 E + 2]``: rows computed by each expert, rows that wanted each, missed, offered (see
            :class:`Assignment`), of this replica's tokens; ``None`` if nothing was.
        """
        load, self.load, self._counted = self.load, None, CountedForwards()
        return load

    def _choose(self, scores: Tensor, chosen: Tensor) -> Assignment:
        """Gate with the scores of the chosen; normalised among them if there are several.

        That of a single one is left as it is, or the router would get no gradient (Switch, equation 2).
        """
        gate = scores.gather(1, chosen)
        if self.config.top_k > 1:
            gate = gate / gate.sum(dim=1, keepdim=True)
        factor = self.config.capacity_factor
        capacity = None if factor is None else self._capacity(len(scores), factor)
        return token_choice(chosen, gate, num_experts=self.config.num_experts, capacity=capacity)

    def _balanced(self, logits: Tensor) -> Tensor:
        """Expert of each token, ``[T]``: equal shares in training, each token's best in evaluation."""
        if not self.training:
            return logits.argmax(dim=1)
        plan = sinkhorn(logits, num_iterations=self.config.sinkhorn_iterations)
        return balanced(plan, capacity=self._capacity(len(logits), 1.0))

    def _capacity(self, num_tokens: int, factor: float) -> int:
        config = self.config
        return capacity_of(num_tokens, num_experts=config.num_experts, top_k=config.top_k, factor=factor)

    def _note(self, assignment: Assignment) -> None:
        """Count for the batch; only once where the forward is repeated for the backward."""
        if not (self.training and self._counted.once()):
            return
        offered = torch.full_like(assignment.num_missed, assignment.num_offered)
        rest = torch.stack((assignment.num_missed, offered))
        load = torch.cat((assignment.counts, assignment.wanted, rest))
        self.load = load if self.load is None else self.load + load


class MoEBlock(Block):
    """A transformer block with experts in the place of its MLP.

    Args:
        config: the model's size and kind.
        experts: number of experts and how tokens find them.
    """

    def __init__(self, config: GPTConfig, experts: ExpertConfig) -> None:
        self._experts = experts  # needed while the base class builds
        super().__init__(config)

    def make_mlp(self, config: GPTConfig) -> nn.Module:
        """Build router and experts."""
        return MoEMLP(config, self._experts)
