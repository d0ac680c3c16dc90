"""LLaMA-MoE (Zhu et al. 2024): Llama whose MLPs are split into experts behind a noisy top-k gate.

On the hub it is remote code; this is the same function, with the same weight names, on the Llama of
``transformers``. Letters: ``T`` tokens, ``E`` experts, ``K`` experts a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

_GATES = ("linear", "mlp")
_EPSILON = 1e-10


class LlamaMoEConfig(LlamaConfig):  # type: ignore[misc]
    """Llama's configuration and the keys of LLaMA-MoE's ``config.json``.

    Attributes:
        num_experts: ``E``.
        num_selects: ``K``.
        size_experts: width of every expert of every layer; ``None`` for equal shares of ``intermediate_size``.
        gate_network: ``"mlp"`` or ``"linear"``.
        gate_use_softmax: whether the chosen scores are normalised.
        gate_use_balance: whether the balance loss counts.
        gate_balance_loss_weight: its weight.
        gate_add_noise: whether training adds learned noise to the scores.
        gate_noise_epsilon: least standard deviation of the noise.
        multiply_gate_scores: whether experts' answers are weighted.
        score_scale_factor: factor of the weights, for all layers or one a layer.
    """

    model_type = "llama_moe"

    num_experts: int = 16
    num_selects: int = 4
    size_experts: Any = None
    gate_type: str = "TopKBalancedNoisyGate"
    gate_network: str = "mlp"
    gate_use_softmax: bool = True
    gate_use_balance: bool = True
    gate_balance_loss_weight: float = 1e-2
    gate_add_noise: bool = True
    gate_noise_epsilon: float = 1e-2
    calculator_type: str = "UniversalCalculator"
    multiply_gate_scores: bool = True
    score_scale_factor: Any = 1.0
    add_weight_norm: bool = False

    def problems(self) -> list[str]:
        """List what the layers here can't do, or nobody could."""
        rules = {
            f"num_selects={self.num_selects} must be between 1 and num_experts={self.num_experts}":
                1 <= self.num_selects <= self.num_experts,
            f"gate_type={self.gate_type!r} must be 'TopKBalancedNoisyGate'":
                self.gate_type == "TopKBalancedNoisyGate",
            f"calculator_type={self.calculator_type!r} must be 'UniversalCalculator' (no token dropped)":
                self.calculator_type == "UniversalCalculator",
            f"gate_network={self.gate_network!r} must be one of {', '.join(_GATES)}": self.gate_network in _GATES,
            "add_weight_norm=true is not supported": not self.add_weight_norm,
            f"num_experts={self.num_experts} must divide intermediate_size={self.intermediate_size}, or size_experts "
            "must be given": self.size_experts is not None or self.intermediate_size % self.num_experts == 0,
        }
        return [text for text, holds in rules.items() if not holds]


@dataclass
class Choice:
    """What a gate decides.

    Attributes:
        experts: chosen experts of every token, ``[T, K]``.
        scores: their weights, ``[T, K]``.
        balance_loss: weighted, a float32 scalar.
    """

    experts: Tensor
    scores: Tensor
    balance_loss: Tensor


def spread(x: Tensor) -> Tensor:
    """Squared coefficient of variation of a float32 sample ``[E]``; 0 for a single value."""
    if len(x) == 1:
        return torch.zeros((), device=x.device)
    x = x.float()
    return x.var() / (x.mean() ** 2 + _EPSILON)


class NoisyGate(nn.Module):
    """Noisy top-k gating with a balance loss (Shazeer et al. 2017, section 4 and appendix A)."""

    def __init__(self, config: LlamaMoEConfig) -> None:
        super().__init__()
        self.config = config
        width, num_experts = config.hidden_size, config.num_experts
        first = nn.Linear(width, num_experts, bias=False)
        second = nn.Linear(num_experts, num_experts, bias=False)
        self.gate_network = first if config.gate_network == "linear" else nn.Sequential(first, nn.Tanh(), second)
        self.weight_noise = nn.Linear(width, num_experts, bias=False) if config.gate_add_noise else None

    def forward(self, x: Tensor) -> Choice:
        """Choose experts for the tokens ``[T, hidden]``."""
        config = self.config
        clean = self.gate_network(x)
        noise = std = None
        if self.training and self.weight_noise is not None:
            std = F.softplus(self.weight_noise(x)) + config.gate_noise_epsilon
            noise = torch.randn_like(clean) * std
        logits = clean if noise is None else clean + noise
        best = logits.topk(min(config.num_selects + 1, config.num_experts), dim=1)
        experts = best.indices[:, : config.num_selects]
        scores = best.values[:, : config.num_selects]
        if config.gate_use_softmax:
            scores = scores.float().softmax(dim=1).to(logits.dtype)
        by_expert = torch.zeros_like(logits).scatter(1, experts, scores)
        if not config.gate_use_balance:
            return Choice(experts, scores, torch.zeros((), device=x.device))
        if noise is None or std is None or config.num_selects == config.num_experts:
            load = (by_expert > 0).sum(0)
        else:
            load = self._likely_load(clean, noise, std, best.values)
        loss = spread(by_expert.sum(0)) + spread(load)
        return Choice(experts, scores, (loss * config.gate_balance_loss_weight).float())

    def _likely_load(self, clean: Tensor, noise: Tensor, std: Tensor, best: Tensor) -> Tensor:
        """Expected tokens of each expert if the noise were drawn again, ``[E]``, differentiable."""
        threshold_in = best[:, self.config.num_selects, None]
        threshold_out = best[:, self.config.num_selects - 1, None]
        # LLaMA-MoE compares the noise alone, not the noisy score; kept, since its routers learned with it.
        is_in = noise > threshold_in
        distance = torch.where(is_in, clean - threshold_in, clean - threshold_out) / std
        return (0.5 * (1 + torch.erf(distance / math.sqrt(2)))).sum(0)


class SplitExperts(nn.Module):
    """The pieces of a Llama MLP, one an expert."""

    def __init__(self, config: LlamaMoEConfig, layer: int) -> None:
        super().__init__()
        equal = [config.intermediate_size // config.num_experts] * config.num_experts
        sizes = equal if config.size_experts is None else config.size_experts[layer]
        hidden = config.hidden_size
        self.act = ACT2FN[config.hidden_act]
        self.weight_gate = nn.ParameterList(torch.randn(size, hidden) / hidden**0.5 for size in sizes)
        self.weight_up = nn.ParameterList(torch.randn(size, hidden) / hidden**0.5 for size in sizes)
        self.weight_down = nn.ParameterList(torch.randn(hidden, size) / size**0.5 for size in sizes)

    def forward(self, x: Tensor, expert: int) -> Tensor:
        """Map an expert's rows ``[rows, hidden]`` to the same shape."""
        gate = self.act(F.linear(x, self.weight_gate[expert]))
        return F.linear(gate * F.linear(x, self.weight_up[expert]), self.weight_down[expert])


class Calculator(nn.Module):
    """Experts and the order in which they run; the name stands in the weights' names."""

    def __init__(self, config: LlamaMoEConfig, layer: int) -> None:
        super().__init__()
        self.experts: nn.Module = SplitExperts(config, layer)
        self.num_experts = config.num_experts
        factor = config.score_scale_factor
        self.factor = factor[layer] if isinstance(factor, list) else factor
        self.weighted = config.multiply_gate_scores

    def forward(self, x: Tensor, choice: Choice) -> Tensor:
        """Add up the weighted answers of the chosen experts, ``[T, hidden]``."""
        if not isinstance(self.experts, SplitExperts):  # someone else computes them
            weights = choice.scores * self.factor if self.weighted else None
            return self.experts(x, choice.experts, weights)  # type: ignore[no-any-return]
        num_selects = choice.experts.shape[1]
        chosen, order = choice.experts.flatten().sort(stable=True)
        token = order // num_selects
        counts = torch.bincount(chosen, minlength=self.num_experts).tolist()
        rows = torch.split(x.index_select(0, token), counts)
        answers = torch.cat([self.experts(part, i) for i, part in enumerate(rows) if len(part)])
        if self.weighted:
            answers = answers * (choice.scores.flatten().index_select(0, order)[:, None] * self.factor)
        return torch.zeros_like(x).index_add(0, token, answers.to(x.dtype))


class LlamaMoEMLP(nn.Module):
    """Gate and experts in the place of a Llama MLP."""

    def __init__(self, config: LlamaMoEConfig, layer: int) -> None:
        super().__init__()
        self.gate = NoisyGate(config)
        self.calculator = Calculator(config, layer)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, seq, hidden]`` to the same shape."""
        tokens = x.reshape(-1, x.shape[-1])
        out: Tensor = self.calculator(tokens, self.gate(tokens))
        return out.view_as(x)


def build_block(config: LlamaMoEConfig, layer: int) -> nn.Module:
    """Build a Llama block with experts; ``layer`` is its index."""
    block: nn.Module = LlamaDecoderLayer(config, layer)
    block.mlp = LlamaMoEMLP(config, layer)
    return block
