"""Folders as they come: shards, one file, other names, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

from dynpipe_ds.hf import PretrainedFolder, causal_lm_layers  # noqa: E402
from dynpipe_ds.hf.save import plan_shards  # noqa: E402
from tests.hf import tiny  # noqa: E402


def weights(path: Path) -> dict[str, Any]:
    return {piece.stored: piece.part for layer in tiny.build(causal_lm_layers(path)) for piece in layer.pieces()}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write("gpt2", tmp_path_factory.mktemp("gpt2") / "model", max_shard="1GB")


def changed(source: Path, target: Path, change: Any) -> Path:
    """A copy of a folder of one file with other weights."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    held = safetensors.load_file(source / "model.safetensors")
    safetensors.save_file(change(held), target / "model.safetensors")
    return target


def test_names_without_the_prefix_and_the_other_end_of_a_tie(gpt2: Path, tmp_path: Path) -> None:
    bare = changed(gpt2, tmp_path / "bare", lambda held: {n.removeprefix("transformer."): t for n, t in held.items()})
    other = changed(gpt2, tmp_path / "other", lambda held: {
        "lm_head.weight" if n == "transformer.wte.weight" else n: t for n, t in held.items()
    })  # fmt: skip
    expected = weights(gpt2)
    for path in (bare, other):
        found = weights(path)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_fused_experts(tmp_path: Path) -> None:
    import transformers

    split = tiny.write("mixtral", tmp_path / "split")
    model = transformers.AutoModelForCausalLM.from_pretrained(split)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert PretrainedFolder(tmp_path / "fused").find(["model.layers.0.mlp.experts.gate_up_proj"])
    found, expected = weights(tmp_path / "fused"), weights(split)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_other_precision_is_converted(gpt2: Path, tmp_path: Path) -> None:
    half = changed(gpt2, tmp_path / "half", lambda held: {n: t.bfloat16() for n, t in held.items()})
    expected = weights(gpt2)
    assert all(torch.equal(t, expected[n].bfloat16().float()) for n, t in weights(half).items())


def test_what_is_wrong_is_said_at_start(gpt2: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist: download the model first"):
        causal_lm_layers(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="holds no config.json"):
        causal_lm_layers(tmp_path)
    lacking = changed(gpt2, tmp_path / "lacking", lambda held: {n: t for n, t in held.items() if ".h.3." not in n})
    with pytest.raises(ValueError, match=r"holds no weight transformer\.h\.3\..*it is not a GPT2"):
        causal_lm_layers(lacking)
    wide = changed(gpt2, tmp_path / "wide", lambda held: held | {"transformer.ln_f.weight": torch.ones(3)})
    with pytest.raises(ValueError, match=r"transformer.ln_f.weight in .* has shape \[3\].* asks for \[16\]"):
        causal_lm_layers(wide)
    (wide / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        causal_lm_layers(wide)
    (wide / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds neither model.safetensors nor"):
        causal_lm_layers(wide)
    index = {"weight_map": {"transformer.ln_f.weight": "model-00001-of-00002.safetensors"}}
    (wide / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="lacks model-00001-of-00002.safetensors, which"):
        causal_lm_layers(wide)


def test_shards_keep_ranks_apart_and_write_tied_weights_once() -> None:
    sizes = [[("a", 4), ("b", 4), ("c", 1)], [], [("d", 9), ("e", 1), ("a", 4)]]
    shards = plan_shards(sizes, max_shard_bytes=8)
    assert [(s.rank, s.names) for s in shards] == [(0, ("a", "b")), (0, ("c",)), (2, ("d",)), (2, ("e",))]
    assert [s.file for s in shards][::3] == ["model-00001-of-00004.safetensors", "model-00004-of-00004.safetensors"]
    (single,) = plan_shards([[("a", 4)], []], max_shard_bytes=8)
    assert single.file == "model.safetensors"
