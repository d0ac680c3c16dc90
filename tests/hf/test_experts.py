"""Experts that another module computes: stacks, a replica's own rows of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from dynpipe_ds import Replica, building_replica, own_by_replica  # noqa: E402
from dynpipe_ds.hf import ExpertStacks, PretrainedFolder, causal_lm_layers  # noqa: E402
from dynpipe_ds.hf.folder import SINGLE_FILE  # noqa: E402
from dynpipe_ds.hf.layers import PretrainedLayer  # noqa: E402
from dynpipe_ds.owning import building, owner_of  # noqa: E402
from tests.hf import tiny  # noqa: E402

BLOCK = 2
"""A layer with experts."""


class Own(nn.Module):
    """Keeps this replica's rows; computes expert by expert and token by token where it has all."""

    def __init__(self, stacks: ExpertStacks) -> None:
        super().__init__()
        self.stacks, replica = stacks, building_replica()
        for name, whole in stacks.weights.items():
            rows = replica.rows(len(whole))
            own = nn.Parameter(whole.detach()[rows.start : rows.stop].clone())
            if replica.count > 1:
                own_by_replica(own, replica)
            self.register_parameter(name, own)

    def forward(self, tokens: Tensor, chosen: Tensor, gates: Tensor | None) -> Tensor:
        stacks, out = self.stacks, []
        for t, token in enumerate(tokens):
            total = torch.zeros_like(token)
            for k, expert in enumerate(chosen[t].tolist()):
                gate_up = torch.cat([getattr(self, name)[expert] @ token for name in stacks.gate_up])
                gate, up = gate_up.chunk(2)
                answer = getattr(self, stacks.down)[expert] @ (stacks.activation(gate) * up)
                total = total + (answer if gates is None else answer * gates[t, k])
            out.append(total)
        return torch.stack(out)


def write(name: str, root: Path, **changes: Any) -> Path:
    made = tiny.write_llama_moe(root / "own", **changes) if name == "llama_moe" else tiny.write("mixtral", root / "own")
    return fused(made, root / "fused") if name == "mixtral, stacked" else made


def fused(source: Path, target: Path) -> Path:
    """A Mixtral whose files hold experts as stacks."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    held = {n: t for layer in built(source, None) for n, t in layer._named().items()}
    weights = {name: parameter.detach().clone() for name, parameter in held.items()}
    safetensors.save_file(weights, target / SINGLE_FILE, metadata={"format": "pt"})
    return target


def built(model: Any, experts: Any, replica: Replica | None = None) -> list[PretrainedLayer]:
    with building(replica or Replica()):
        specs = causal_lm_layers(model, experts=experts, router_loss_weight=0.0)
        return tiny.build(specs)


@pytest.mark.parametrize("name", ["mixtral", "mixtral, stacked", "llama_moe"])
def test_each_replica_reads_its_own_experts(name: str, tmp_path: Path) -> None:
    """Not a byte of the others', and under the names that files have."""
    path = write(name, tmp_path)
    expected = {piece.stored: piece.part for piece in built(path, None)[BLOCK].pieces()}
    seen = []
    for index in range(2):
        specs = causal_lm_layers(folder := PretrainedFolder(path), experts=Own)
        with building(Replica(index, 2)):
            layer = specs[BLOCK].build().to("cpu")
        owned = {piece.stored: piece.part for piece in layer.pieces() if piece.rows is not None}
        assert len(owned) == 3 * 2 and all(torch.equal(part, expected[n]) for n, part in owned.items())
        assert folder.bytes_read == layer.num_bytes()
        owners = {n: owner_of(p) for n, p in layer.named_parameters()}
        assert {n for n, owner in owners.items() if owner == Replica(index, 2)} == {n for n in owners if "experts" in n}
        seen.append(set(owned))
    assert not seen[0] & seen[1] and seen[0] | seen[1] == {n for n in expected if ".experts." in n}


@pytest.mark.parametrize("name", ["mixtral", "llama_moe"])
def test_another_module_computes_them(name: str, tmp_path: Path) -> None:
    """The same function, with weights of a folder and with random ones; a token's load is noted as before."""
    made = tiny.config("llama_moe", gate_add_noise=False) if name == "llama_moe" else tiny.config(name)
    for model in (write(name, tmp_path), made):
        outputs = []
        for experts in (None, Own):
            torch.manual_seed(0)
            layer = built(model, experts)[BLOCK].eval()
            outputs.append(layer(torch.randn(2, tiny.LENGTH, 16, generator=torch.Generator().manual_seed(1))))
        assert torch.allclose(*outputs, atol=1e-5) and not torch.equal(outputs[0], torch.zeros_like(outputs[0]))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="experts= needs a model with experts, but model_type='llama' has none"):
        built(tiny.config("llama"), Own)
    sizes = [[8, 8, 8, 8], [4, 12, 8, 8], [8] * 4, [8] * 4]
    with pytest.raises(ValueError, match=r"experts= needs experts of one width, but size_experts=\[4, 12, 8, 8\]"):
        built(tiny.config("llama_moe", size_experts=sizes), Own)
