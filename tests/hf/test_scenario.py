"""``model=hf`` in the training entry."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'dynpipe_ds[hf]'")

from scenarios.scenario import build_layers, build_scenario  # noqa: E402
from scenarios.settings import Settings, config_folder  # noqa: E402
from tests.distributed.ranks import run_ranks  # noqa: E402
from tests.hf import tiny  # noqa: E402


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.write(name, root / name) for name in tiny.NAMES}


def settings(*overrides: str) -> Settings:
    with initialize_config_dir(config_dir=str(config_folder()), version_base=None):
        values: Any = OmegaConf.to_container(compose("config", overrides=["model=hf", *overrides]), resolve=True)
    return Settings.from_mapping(values)


def layers(found: Settings) -> list[Any]:
    return build_layers(build_scenario(found.scenario, found.scenario_settings), found.model)


@pytest.mark.parametrize(("model", "scenario"), [
    ("gpt2", "none"), ("llama", "none"), ("llama", "freezing"), ("mixtral", "none"), ("mixtral", "freezing"),
    ("mixtral", "moe_continual"),
])  # fmt: skip
def test_a_folder_composes_with_scenarios(folders: dict[str, Path], model: str, scenario: str) -> None:
    found = settings(f"model.path={folders[model]}", "model.seq_len=16", f"scenario={scenario}")
    assert len(layers(found)) == (8 if model == "gpt2" else 6)
    assert (found.model.vocab_size, found.model.depth) == (tiny.VOCABULARY, 4)
    kept = json.loads(json.dumps(dataclasses.asdict(found), default=str))["model"]
    assert kept == {"path": str(folders[model]), "seq_len": 16, "split_blocks": False}


def test_what_does_not_fit_is_refused(folders: dict[str, Path]) -> None:
    llama, mixtral = (f"model.path={folders[name]}" for name in ("llama", "mixtral"))
    with pytest.raises(ValueError, match="model.path is missing: model=hf needs a local model folder"):
        settings()
    with pytest.raises(ValueError, match="model.seq_len=128 must be between 1 and the model's 32 positions"):
        settings(f"model.path={folders['gpt2']}")
    with pytest.raises(ValueError, match="MixtureOfExperts changes the blocks of the shared GPT, which model=hf does"):
        layers(settings(llama, "scenario=moe"))
    with pytest.raises(ValueError, match="scenario.cache=true does not go with layers that change"):
        layers(settings(llama, "scenario=freezing", "scenario.cache=true"))
    with pytest.raises(ValueError, match="trains a model that brings its experts: set model=hf"):
        layers(settings(llama, "scenario=moe_continual"))
    with pytest.raises(ValueError, match="aux_weight=-1 must be 0 or more"):
        layers(settings(mixtral, "scenario=moe_continual", "scenario.aux_weight=-1"))
    with pytest.raises(ValueError, match="placement=local places experts, and expert_weights=replicated gives all"):
        layers(settings(mixtral, "scenario=moe_continual", "scenario.placement=local"))


def test_shared_experts_that_do_not_fit_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    sharded = ("model.seq_len=16", "scenario=moe_continual", "scenario.expert_weights=sharded")
    found = settings(f"model.path={folders['mixtral']}", *sharded)
    scenario = build_scenario(found.scenario, found.scenario_settings)
    build_layers(scenario, found.model)
    scenario.check_replicas(2)
    with pytest.raises(ValueError, match="num_experts=4 on 3 data-parallel replicas"):
        scenario.check_replicas(3)
    uneven = tiny.write_llama_moe(tmp_path / "uneven", size_experts=[[4, 12, 8, 8]] * 4)
    assert len(layers(settings(f"model.path={uneven}", "model.seq_len=16", "scenario=moe_continual"))) == 6
    with pytest.raises(ValueError, match=r"sharded needs experts of one width, .* \[4, 12, 8, 8\] in a block"):
        layers(settings(f"model.path={uneven}", *sharded))


def entry_and_pieces(rank: int, found: Settings) -> dict[str, torch.Tensor]:
    """Run the whole entry, and tell which weights this rank had at its end, by their names in the folder."""
    from dynpipe_ds.hf import PretrainedLayer
    from scenarios import train

    held: dict[str, torch.Tensor] = {}
    original = train.export

    def noting(engine: Any, *rest: Any) -> None:
        layers = [module for module in engine.module.modules() if isinstance(module, PretrainedLayer)]
        held.update({piece.stored: piece.part.detach().clone() for layer in layers for piece in layer.pieces()})
        original(engine, *rest)

    train.export = noting
    try:
        train.run(found)
    finally:
        train.export = original
    return held


def test_a_finished_run_keeps_its_model(folders: dict[str, Path], tmp_path: Path) -> None:
    """``run.export``: a folder that transformers loads, with the weights that were trained, bit for bit."""
    import transformers

    data = tmp_path / "tokens.npy"
    np.save(data, np.random.default_rng(0).integers(tiny.VOCABULARY, size=3000))
    found = settings(
        f"model.path={folders['gpt2']}", "model.seq_len=16", "scenario=none", "run.batches=4", "run.window=1",
        f"run.export={tmp_path / 'kept'}", f"output_dir={tmp_path / 'out'}", "ds.train_micro_batch_size_per_gpu=1",
        "ds.gradient_accumulation_steps=2", f"data.path={data}", "data.format=null",
    )  # fmt: skip
    held = {name: tensor for part in run_ranks(entry_and_pieces, 2, found) for name, tensor in part.items()}
    kept, before = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (tmp_path / "kept", folders["gpt2"])
    )
    assert kept.keys() - held.keys() == {"lm_head.weight"}, "which is the embedding's"
    assert all(torch.equal(kept[name], tensor) for name, tensor in held.items())
    assert not any(torch.equal(kept[name], before[name]) for name in kept if name.endswith("weight"))
