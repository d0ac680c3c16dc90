"""``model=hf`` in the training entry."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
pytest.importorskip("safetensors", reason="safetensors is not installed: pip install 'dynpipe_ds[hf]'")

from scenarios.scenario import build_layers, build_scenario  # noqa: E402
from scenarios.settings import Settings, config_folder  # noqa: E402
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
