"""LLaMA-MoE against its formulas, written the plain way, one token and one expert at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'dynpipe_ds[hf]'")

from dynpipe_ds.hf import causal_lm_layers, take_expert_load  # noqa: E402
from dynpipe_ds.hf.llama_moe import LlamaMoEMLP  # noqa: E402
from tests.hf import tiny  # noqa: E402


def make(**changes: Any) -> LlamaMoEMLP:
    torch.manual_seed(0)
    mlp = LlamaMoEMLP(tiny.config("llama_moe", **changes), 1)
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return mlp


def answer(mlp: LlamaMoEMLP, token: Tensor, expert: int) -> Tensor:
    """One expert's answer for one token, ``[hidden]``."""
    weights = mlp.calculator.experts
    gate = F.silu(weights.weight_gate[expert] @ token)
    return weights.weight_down[expert] @ (gate * (weights.weight_up[expert] @ token))


def variation(x: Tensor) -> Tensor:
    return ((x - x.mean()) ** 2).sum() / (len(x) - 1) / x.mean() ** 2


@pytest.mark.parametrize(
    "changes", [{}, {"score_scale_factor": [1.0, 2.0, 1.0, 1.0]}, {"size_experts": [[8, 4, 4, 16]] * 4}]
)
def test_tokens_get_the_weighted_answers_of_their_best_experts(changes: dict[str, Any]) -> None:
    mlp = make(**changes).eval()
    x = torch.randn(2, 6, 16)
    found = mlp(x)
    scale = 2.0 if "score_scale_factor" in changes else 1.0
    for token, result in zip(x.flatten(0, 1), found.flatten(0, 1), strict=True):
        logits = mlp.gate.gate_network(token)
        best = logits.topk(2)
        expected = sum(
            scale * score * answer(mlp, token, int(e))
            for score, e in zip(best.values.softmax(0), best.indices, strict=True)
        )
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


def test_balance_loss_of_training_and_evaluation() -> None:
    """Coefficient of variation of importance, and of the load that is likely if the noise were drawn again."""
    mlp = make()
    x = torch.randn(40, 16)
    gate = mlp.gate
    torch.manual_seed(5)
    choice = gate(x)
    torch.manual_seed(5)
    clean = gate.gate_network(x)
    std = F.softplus(x @ gate.weight_noise.weight.T) + 0.01  # type: ignore[union-attr]
    noise = torch.randn_like(clean) * std
    noisy = clean + noise
    importance, load = torch.zeros(4), torch.zeros(4)
    for token in range(len(x)):
        order = noisy[token].argsort(descending=True)
        assert choice.experts[token].tolist() == order[:2].tolist()
        importance[order[:2]] += noisy[token][order[:2]].softmax(0)
        second, third = noisy[token][order[1]], noisy[token][order[2]]
        for expert in range(4):
            threshold = third if noise[token, expert] > third else second
            load[expert] += 0.5 * (1 + torch.erf((clean[token, expert] - threshold) / std[token, expert] / 2**0.5))
    torch.testing.assert_close(choice.balance_loss, 0.3 * (variation(importance) + variation(load)), rtol=1e-4, atol=0)
    choice.balance_loss.backward()
    assert gate.weight_noise is not None and gate.weight_noise.weight.grad is not None, "the noise learns"
    choice = gate.eval()(x)
    counts = torch.bincount(choice.experts.flatten(), minlength=4).float()
    importance = torch.zeros(4).index_add(0, choice.experts.flatten(), choice.scores.flatten())
    expected = 0.3 * (variation(importance) + variation(counts))
    torch.testing.assert_close(choice.balance_loss, expected, rtol=1e-4, atol=0)


def test_blocks_add_their_losses_up_and_all_weights_have_their_names(tmp_path: Path) -> None:
    specs = causal_lm_layers(tiny.write_llama_moe(tmp_path / "model"))
    layers = tiny.build(specs)
    ids = tiny.batch(1)
    torch.manual_seed(3)
    logits, loss = tiny.run(specs, layers, ids)
    torch.manual_seed(3)
    losses: list[Tensor] = []
    for layer in layers[1:-1]:
        layer.block.mlp.gate.register_forward_hook(lambda _m, _i, choice: losses.append(choice.balance_loss))
    again, _ = tiny.run(specs, layers, ids)
    assert torch.equal(again, logits) and torch.equal(loss, sum(losses)) and len(losses) == 4
    assert int(take_expert_load(layers[1]).sum()) == 2 * 2 * ids.numel()  # type: ignore[union-attr]
    quiet = causal_lm_layers(tmp_path / "model", router_loss_weight=0)
    assert isinstance(tiny.run(quiet, tiny.build(quiet), ids), Tensor)


def test_what_is_not_supported_is_refused() -> None:
    wrong = tiny.config("llama_moe", num_selects=9, gate_network="deep", calculator_type="SwitchDropTokenCalculator")
    with pytest.raises(ValueError, match="num_selects=9 must be between 1 and num_experts=4; calculator.*; gate_n"):
        causal_lm_layers(wrong)
