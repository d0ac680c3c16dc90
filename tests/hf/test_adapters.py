"""Adapters of peft: where peft puts them, with the bits that peft computes; folders both ways; what is refused."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'dynpipe_ds[peft]'")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from dynpipe_ds.hf import causal_lm_layers  # noqa: E402
from dynpipe_ds.host.differences import find_dropout  # noqa: E402
from tests.hf import tiny  # noqa: E402

ALL = "all-linear"
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("gpt2", {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}, {"target_modules": ALL}),
    "llama, by default": ("llama", {}, {}),
    "llama, some blocks, ranks that differ": ("llama", {}, {
        "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1, 3], "rank_pattern": {"down_proj": 2},
        "alpha_pattern": {r"layers\.3\.self_attn.q_proj": 32}, "use_rslora": True,
    }),
    "llama, embedding and head": ("llama", {}, {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "llama tied": ("llama", {"tie_word_embeddings": True}, {"target_modules": ALL}),
    "mixtral": ("mixtral", {}, {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}),
    "qwen2": ("qwen2", {}, {"target_modules": ALL, "exclude_modules": ["down_proj"], "lora_bias": True}),
    "qwen3": ("qwen3", {}, {"target_modules": ALL}),
    "gemma2": ("gemma2", {}, {"target_modules": ALL}),
    "gemma3": ("gemma3_text", {}, {"target_modules": ["k_proj", "gate_proj"]}),
}  # fmt: skip


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **changes})


def adapters_of(layers: list[Any]) -> dict[str, torch.Tensor]:
    return {name: part for layer in layers for name, part in layer.adapter_pieces().items()}


def give_values(layers: list[Any]) -> None:
    """New adapters answer 0; others show that they count."""
    generator = torch.Generator().manual_seed(7)
    for part in adapters_of(layers).values():
        part.copy_(0.3 * torch.randn(part.shape, generator=generator))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {case: tiny.write(name, root / case, **changes) for case, (name, changes, _) in CASES.items()}


def original(folder: Path, config: Any) -> Any:
    import transformers

    return peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), config)


@pytest.mark.parametrize("split_blocks", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_peft(folders: dict[str, Path], case: str, split_blocks: bool) -> None:
    """Adapters are where peft puts them; logits, loss and the gradient of every adapter are peft's."""
    changes = CASES[case][2]
    specs = causal_lm_layers(folders[case], adapter=lora(**changes), attention_mask=True, position_ids=True,
                             split_blocks=split_blocks)  # fmt: skip
    layers = tiny.build(specs)
    give_values(layers)
    theirs = original(folders[case], lora(**changes)).train()
    assert peft.get_peft_model_state_dict(theirs).keys() == adapters_of(layers).keys()
    peft.set_peft_model_state_dict(theirs, {name: part.clone() for name, part in adapters_of(layers).items()})
    tiny.run_both(specs, layers, theirs, padded=True)
    named_by_peft = dict(theirs.named_parameters())
    found = {name.replace(".default", ""): p.grad for name, p in named_by_peft.items() if p.requires_grad}
    trained = [p for layer in dict.fromkeys(layers) for p in layer.parameters() if p.requires_grad]
    assert len(trained) == len(found) > 3
    for layer in dict.fromkeys(layers):
        for name, parameter in layer.named_parameters():
            assert parameter.requires_grad == ("lora_" in name) == (parameter.grad is not None), name
    pointers = {part.data_ptr(): name for name, part in adapters_of(layers).items()}
    gradients = {pointers[p.data_ptr()]: p.grad for p in trained}
    assert gradients.keys() == found.keys()
    assert [name for name, grad in found.items() if not torch.equal(grad, gradients[name])] == []


def test_new_adapters_follow_from_the_seed_and_the_name(folders: dict[str, Path]) -> None:
    """The same for halves and wholes, and whatever was drawn between; drawing them leaves no trace."""
    found = []
    for seed, split_blocks in ((1, False), (1, True), (2, False)):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        specs = causal_lm_layers(folders["qwen3"], adapter=lora(target_modules=ALL), split_blocks=split_blocks)
        assert torch.equal(torch.get_rng_state(), state), "listing layers draws nothing"
        torch.rand(seed + split_blocks)
        found.append(adapters_of(tiny.build(specs)))
    first, halves, other = found
    assert first.keys() == halves.keys() == other.keys()
    assert all(torch.equal(part, halves[name]) for name, part in first.items())
    drawn = {name: part for name, part in first.items() if "lora_A" in name}
    assert not any(torch.equal(part, other[name]) for name, part in drawn.items())
    assert len({tuple(part.flatten()[:4].tolist()) for part in drawn.values()}) == len(drawn), "each its own"
    assert not any(part.any() for name, part in first.items() if "lora_B" in name), "at first they answer 0"
    bound = max(float(part.abs().max()) for name, part in drawn.items() if "q_proj" in name)
    assert 0.2 < bound <= 1 / 16**0.5, "as nn.Linear"


def test_the_page_adds_one_argument(folders: dict[str, Path]) -> None:
    """The block of docs/huggingface.md, with another folder."""
    page = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")
    _, block = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert "/models/gpt2" in block
    space: dict[str, Any] = {}
    exec(block.replace("/models/gpt2", str(folders["gpt2"])), space)
    assert len(adapters_of(tiny.build(space["layers"]))) == 4 * 4 * 2


def test_dropout_without_seed_layers_is_named(folders: dict[str, Path]) -> None:
    """In the warning at start, which every dropout without ``seed_layers`` brings."""
    layers = tiny.build(causal_lm_layers(folders["qwen3"], adapter=lora(lora_dropout=0.1)))
    assert find_dropout(dict(enumerate(layers))) == "layer 1.block.self_attn.q_proj.lora_dropout.default (Dropout)"


def test_random_weights_with_adapters() -> None:
    specs = causal_lm_layers(tiny.config("llama"), adapter=lora(target_modules=["v_proj"]))
    layers = tiny.build(specs)
    assert len(adapters_of(layers)) == 8
    assert all(part.any() == ("lora_A" in name) for name, part in adapters_of(layers).items())
    assert {p.device.type for layer in layers for p in layer.parameters()} == {"cpu"}


def test_a_folder_of_peft_is_trained_further(folders: dict[str, Path], tmp_path: Path) -> None:
    model = original(folders["llama tied"], lora(target_modules=ALL))
    for index, (name, parameter) in enumerate(model.named_parameters()):
        if "lora_" in name:
            torch.nn.init.constant_(parameter, index)
    model.save_pretrained(tmp_path / "adapter")
    layers = tiny.build(causal_lm_layers(folders["llama tied"], adapter=tmp_path / "adapter", split_blocks=True))
    expected = safetensors.load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    found = adapters_of(layers)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(p.requires_grad == ("lora_" in n) for layer in layers for n, p in layer.named_parameters())


def test_folders_that_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    path = folders["llama, by default"]
    with pytest.raises(ValueError, match="holds no adapter_config.json: give the folder that save_pretrained of peft"):
        causal_lm_layers(path, adapter=tmp_path)
    original(path, lora()).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"has shape \[4, 16\].* ask for \[4, 32\]: they belong to different models"):
        causal_lm_layers(tiny.write("llama", tmp_path / "wide", hidden_size=32), adapter=tmp_path / "adapter")
    with pytest.raises(ValueError, match="layers.4.self_attn.q_proj.lora_A.weight, which its adapter_config.json asks"):
        causal_lm_layers(tiny.write("llama", tmp_path / "deep", num_hidden_layers=5), adapter=tmp_path / "adapter")
    with pytest.raises(ValueError, match="layers.2.self_attn.q_proj.lora_A.weight, which is nothing of this model"):
        causal_lm_layers(tiny.write("llama", tmp_path / "flat", num_hidden_layers=2), adapter=tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"modules_to_save": ["lm_head"]}))
    with pytest.raises(ValueError, match=r"LoraConfig\(modules_to_save=\['lm_head'\]\) is not supported"):
        causal_lm_layers(path, adapter=tmp_path / "adapter")


@pytest.mark.parametrize(("changes", "message"), [
    ({"target_modules": ["query"]}, "peft refuses this adapter for LlamaPreTrainedModel: Target modules .*query.* not"),
    ({"use_dora": True}, r"LoraConfig\(use_dora=True\) is not supported in a pipeline: leave it out"),
    ({"bias": "all"}, r"LoraConfig\(bias='all'\) is not supported"),
    ({"modules_to_save": ["lm_head"]}, r"LoraConfig\(modules_to_save=\['lm_head'\]\) is not supported"),
    ({"init_lora_weights": "pissa"}, r"init_lora_weights='pissa'\) changes the weights below the adapters"),
    ({"init_lora_weights": False}, r"init_lora_weights=False\) leaves new adapters without values"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(folders: dict[str, Path], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        causal_lm_layers(folders["llama, by default"], adapter=lora(**changes))


def test_live_models_are_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    """With a remedy that works: the folders of both."""
    model = original(folders["llama, by default"], lora())
    with pytest.raises(ValueError, match="not a live PeftModelForCausalLM: give the folder of the model below, and"):
        causal_lm_layers(model)
    with pytest.raises(ValueError, match="not a live LlamaForCausalLM: save it with save_pretrained and give that"):
        causal_lm_layers(model.unload())
    with pytest.raises(ValueError, match="a peft.LoraConfig or a folder with one, not a PeftModelForCausalLM"):
        causal_lm_layers(folders["llama, by default"], adapter=model)
    assert len(causal_lm_layers(folders["llama, by default"], adapter=model.peft_config["default"])) == 6


def test_other_refusals(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"target_modules matches lm_head, which is tied: .* leave it out"):
        causal_lm_layers(folders["llama tied"], adapter=lora(target_modules=["lm_head", "q_proj"]))
    with pytest.raises(ValueError, match="adapter= must be a peft.LoraConfig or a folder with one, not a IA3Config"):
        causal_lm_layers(folders["gpt2"], adapter=peft.IA3Config())
    with pytest.raises(ValueError, match=r"LoraConfig\(target_parameters=.* is not supported in a pipeline"):
        causal_lm_layers(folders["mixtral"], adapter=lora(target_modules=["w1", "w3"]))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(ImportError, match=r"needs peft, not installed here: pip install 'dynpipe_ds\[peft\]'"):
        causal_lm_layers(folders["gpt2"], adapter=lora())
