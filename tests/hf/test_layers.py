"""Logits, losses and gradients have the bits of the original model's."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'dynpipe_ds[hf]'")

from dynpipe_ds.hf import PretrainedFolder, causal_lm_layers, causal_lm_loss, take_expert_load  # noqa: E402
from dynpipe_ds.hf.extra import check_extra  # noqa: E402
from tests.hf import tiny  # noqa: E402

NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
SCALED = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", NO_DROPOUT),
    "gpt2 untied, scaled by depth": (
        "gpt2", {**NO_DROPOUT, "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True},
    ),
    "llama": ("llama", {}),
    "llama tied, scaled rotary": ("llama", {"tie_word_embeddings": True, "rope_parameters": SCALED}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "qwen3": ("qwen3", {}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {}),
    "gemma2 untied, no cap": ("gemma2", {"tie_word_embeddings": False, "final_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {}),
    "gemma3 untied, capped, scaled rotary": ("gemma3_text", {
        "tie_word_embeddings": False, "final_logit_softcapping": 0.5,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": None},
    }),
    "mixtral": ("mixtral", {}),
    "mixtral, sliding window": ("mixtral", {"sliding_window": 4}),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {case: tiny.write(name, root / case, **changes) for case, (name, changes) in CASES.items()}


def gradients(layers: list[Any]) -> dict[str, Any]:
    return {
        f"{stored}.{name}": parameter.grad
        for layer in layers
        for attribute, stored in layer.stored_as.items()
        for name, parameter in layer.get_submodule(attribute).named_parameters()
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_same_bits_as_the_original(folders: dict[str, Path], case: str, dtype: torch.dtype, padded: bool) -> None:
    import transformers

    original = transformers.AutoModelForCausalLM.from_pretrained(folders[case], dtype=dtype).train()
    specs = causal_lm_layers(folders[case], dtype=dtype, attention_mask=padded, position_ids=padded)
    layers = tiny.build(specs)
    tiny.run_both(specs, layers, original, padded=padded)
    ours = gradients(layers)
    theirs = {name: parameter.grad for name, parameter in original.named_parameters()}
    assert ours.keys() == theirs.keys() and len(theirs) > 10
    assert [name for name, grad in theirs.items() if not torch.equal(grad, ours[name])] == []


@pytest.mark.parametrize("case", CASES)
def test_halves_of_blocks_have_the_bits_of_the_whole(folders: dict[str, Path], case: str) -> None:
    found = []
    for split_blocks in (False, True):
        specs = causal_lm_layers(folders[case], attention_mask=True, position_ids=True, split_blocks=split_blocks)
        layers = tiny.build(specs)
        inputs, labels = next(tiny.batches(3, padded=True))
        loss = causal_lm_loss(tiny.run(specs, layers, inputs), labels)
        loss.backward()
        found.append((loss, gradients(layers), len(specs)))
    (expected, theirs, num_whole), (loss, ours, num_parts) = found
    assert num_parts == num_whole + 4, "four blocks"
    assert torch.equal(loss, expected) and ours.keys() == theirs.keys()
    assert [name for name, grad in theirs.items() if not torch.equal(grad, ours[name])] == []


def test_routers_report_their_load_and_its_loss_can_be_left_out(folders: dict[str, Path]) -> None:
    specs = causal_lm_layers(folders["mixtral"], router_loss_weight=0)
    layers = tiny.build(specs)
    ids = tiny.batch(3)
    assert isinstance(tiny.run(specs, layers, ids), torch.Tensor)
    with torch.no_grad():
        tiny.run(specs, layers, ids)
    loads = [take_expert_load(layer) for layer in layers]
    assert [load is None for load in loads] == [True, False, False, False, False, True]
    assert all(int(load.sum()) == 2 * ids.numel() for load in loads[1:5] if load is not None), "counted once"
    assert take_expert_load(layers[1]) is None
    with pytest.raises(ValueError, match="router_loss_weight=0.1 needs experts, but model_type='llama' has none"):
        causal_lm_layers(folders["llama"], router_loss_weight=0.1)
    with pytest.raises(ValueError, match="router_loss_weight=-1 must be 0 or more"):
        causal_lm_layers(folders["mixtral"], router_loss_weight=-1)
    own, twice = (causal_lm_layers(folders["mixtral"], router_loss_weight=weight) for weight in (None, 1.0))
    losses = [tiny.run(specs, tiny.build(specs), ids)[1] for specs in (own, twice)]
    assert torch.equal(2 * losses[0], losses[1])


def as_parts(activation: Any) -> tuple[Any, ...]:
    return activation if isinstance(activation, tuple) else (activation,)


def run_parts(layer: Any, *parts: Any) -> Any:
    return layer(parts if len(parts) > 1 else parts[0])


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "llama_moe"])
def test_routers_count_once_where_activations_are_checkpointed(tmp_path: Path, family: str, reentrant: bool) -> None:
    """A forward that is run again in the backward routes the same tokens, and the next batch starts at 0."""
    write = tiny.write_llama_moe if family == "llama_moe" else partial(tiny.write, family)
    specs = causal_lm_layers(write(tmp_path / family))
    layers, ids = tiny.build(specs), tiny.batch(3)
    for _batch in range(2):
        for _micro_batch in range(2):
            x = layers[0](ids)
            for layer in layers[1:-1]:
                x = checkpoint(partial(run_parts, layer), *as_parts(x), use_reentrant=reentrant)
            sum(part.sum() for part in as_parts(layers[-1](x))).backward()
        loads = [take_expert_load(layer) for layer in layers[1:-1]]
        assert [int(load.sum()) for load in loads if load is not None] == [2 * 2 * ids.numel()] * 4


def test_angles_stay_exact_when_the_weights_are_rounded(folders: dict[str, Path]) -> None:
    block: Any = tiny.build(causal_lm_layers(folders["llama"]))[1].bfloat16()
    assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in block.rotary.buffers()} == {torch.float32}


def test_random_weights_follow_the_configuration() -> None:
    torch.manual_seed(0)
    layers = tiny.build(causal_lm_layers(tiny.config("gpt2", hidden_size=256, initializer_range=0.1)))
    block = layers[2].block
    assert abs(float(block.attn.c_attn.weight.detach().std()) - 0.1) < 0.005
    assert abs(float(block.mlp.c_proj.weight.detach().std()) - 0.1 / 8**0.5) < 0.005
    assert not block.attn.c_attn.bias.any()


def test_a_layer_takes_no_memory_and_reads_nothing_until_it_is_used(folders: dict[str, Path]) -> None:
    folder = PretrainedFolder(folders["mixtral"])
    layers = [spec.build() for spec in causal_lm_layers(folder)]
    assert all(p.is_meta for layer in layers for p in layer.parameters()) and folder.bytes_read == 0
    layers[2].to("cpu")
    size = sum(p.nbytes for p in layers[2].parameters())
    assert folder.bytes_read == size and not any(p.is_meta for p in layers[2].parameters())
    layers[2].to("cpu")
    assert folder.bytes_read == size, "read once"


def test_wrong_inputs_and_models_are_refused(folders: dict[str, Path]) -> None:
    specs = causal_lm_layers(folders["llama"], attention_mask=True)
    with pytest.raises(ValueError, match="the inputs have 1 parts but the layers were made for 2"):
        specs[0].build().to("cpu")(tiny.batch(0))
    import transformers

    with pytest.raises(ValueError, match="model_type='bert' is not one of gemma2, gemma3_text, gpt2, llama, llama_moe"):
        causal_lm_layers(transformers.BertConfig())
    with pytest.raises(ValueError, match="add_cross_attention=true"):
        causal_lm_layers(tiny.config("gpt2", add_cross_attention=True))
    with pytest.raises(ValueError, match="use_bidirectional_attention=true"):
        causal_lm_layers(tiny.config("gemma3_text", use_bidirectional_attention=True))


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    with pytest.raises(ImportError, match=r"needs transformers, not installed here: pip install 'dynpipe_ds\[hf\]'"):
        check_extra()


@pytest.mark.exhaustive
def test_the_library_itself_does_not_import_transformers() -> None:
    code = "import sys, dynpipe_ds, scenarios.train; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
