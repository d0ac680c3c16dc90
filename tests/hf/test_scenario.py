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

from scenarios.begun import expected  # noqa: E402
from scenarios.opening import opening  # noqa: E402
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
    assert kept == {
        "path": str(folders[model]), "seq_len": 16, "split_blocks": False, "lora": {"r": None, "path": None}
    }


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


def entry_and_state(rank: int, found: Settings) -> tuple[dict[str, torch.Tensor], Any]:
    """Run the whole entry; tell what the dynamic run had at its end: this rank's weights and adapters by their names in
    the folder, and the logits of some tokens."""
    from dynpipe_ds.hf import PretrainedLayer
    from scenarios import train

    held: dict[str, torch.Tensor] = {}
    logits: list[Any] = []
    original = train.export

    def noting(engine: Any, *rest: Any) -> None:
        for layer in (module for module in engine.module.modules() if isinstance(module, PretrainedLayer)):
            named = {piece.stored: piece.part for piece in layer.pieces()} | layer.adapter_pieces()
            held.update({name: part.detach().clone() for name, part in named.items()})
        logits.append(engine.eval_batch(tiny.batches(9, padded=False), return_logits=True)[1])
        original(engine, *rest)

    train.export = noting
    try:
        train.run(found)
    finally:
        train.export = original
    return held, logits[0]


def run_entry(tmp_path: Path, *overrides: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Train four batches on two ranks and keep the model in ``kept``; weights of both ranks, and logits."""
    data = tmp_path / "tokens.npy"
    np.save(data, np.random.default_rng(0).integers(tiny.VOCABULARY, size=3000))
    found = settings(
        "model.seq_len=16", "scenario=none", "run.batches=4", "run.window=1",
        f"run.export={tmp_path / 'kept'}", f"output_dir={tmp_path / 'out'}", "ds.train_micro_batch_size_per_gpu=2",
        "ds.gradient_accumulation_steps=3", f"data.path={data}", "data.format=null", *overrides,
    )  # fmt: skip
    by_rank = run_ranks(entry_and_state, 2, found)
    return {name: tensor for held, _ in by_rank for name, tensor in held.items()}, by_rank[-1][1]


def logits_by(model: Any) -> torch.Tensor:
    """What transformers computes of the last of the three micro-batches that the engine evaluated."""
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(tiny.batch(9002)).logits
    return logits


def test_a_finished_run_keeps_its_model(folders: dict[str, Path], tmp_path: Path) -> None:
    """``run.export``: a folder that transformers loads, with the weights that were trained, bit for bit."""
    import transformers

    held, logits = run_entry(tmp_path, f"model.path={folders['gpt2']}")
    trained, untrained = (
        transformers.AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "kept", folders["gpt2"])
    )
    assert torch.equal(logits_by(trained), logits)
    kept, before = trained.state_dict(), untrained.state_dict()
    assert kept.keys() - held.keys() == {"lm_head.weight"}, "which is the embedding's"
    assert all(torch.equal(kept[name], tensor) for name, tensor in held.items())
    assert not any(torch.equal(kept[name], before[name]) for name in kept if name.endswith("weight"))


# -- LoRA adapters -----------------------------------------------------------------------------


def test_a_finished_run_keeps_its_adapters(folders: dict[str, Path], tmp_path: Path) -> None:
    """``model.lora``: adapters are trained on frozen weights; peft loads them and computes the same bits; they are
    trained further by ``model.lora.path``."""
    import transformers

    peft = pytest.importorskip("peft", reason="peft is not installed: pip install 'dynpipe_ds[peft]'")
    path = f"model.path={folders['llama']}"
    held, logits = run_entry(tmp_path, path, "model.lora.r=2", "+model.lora.target_modules=[q_proj,down_proj]")
    base = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"])
    before = base.state_dict()
    assert all(torch.equal(before[name], held[name]) for name in before), "weights below adapters are frozen"
    untrained = logits_by(base)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "kept")
    assert torch.equal(logits_by(model), logits) and not torch.equal(untrained, logits)
    kept = peft.get_peft_model_state_dict(model)
    assert len(kept) == 4 * 2 * 2 and all(torch.equal(kept[name], held[name]) for name in kept)
    further = tiny.build(layers(settings(path, "model.seq_len=16", f"model.lora.path={tmp_path / 'kept'}")))
    found = {name: part for layer in further for name, part in layer.adapter_pieces().items()}
    assert found.keys() == kept.keys() and all(torch.equal(kept[name], part) for name, part in found.items())


def test_adapters_are_told_at_the_start(folders: dict[str, Path]) -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install 'dynpipe_ds[peft]'")
    path = (f"model.path={folders['mixtral']}", "model.seq_len=16")
    found = settings(*path, "model.lora.r=4", "+model.lora.target_modules=[q_proj,v_proj]", "scenario=moe_continual")
    assert "4 blocks, LoRA adapters of rank 4; scenario" in opening(expected(found, 2), 2, resumes=True)
    assert sum(p.requires_grad for layer in tiny.build(layers(found)) for p in layer.parameters()) == 4 * 2 * 2
    assert "LoRA" not in opening(expected(settings(*path), 2), 2, resumes=True)


@pytest.mark.parametrize(("overrides", "message"), [
    (["model.lora.r=4", "model.lora.path=there"], "model.lora has path, r: set r .* or path alone"),
    (["+model.lora.lora_alpha=4"], "model.lora has lora_alpha: set r"),
    (["model.lora.r=four"], "model.lora.r='four' must be a whole number"),
    (["model.lora.r=4", "+model.lora.alpha=4"], "model.lora.alpha is not a setting: did you mean 'lora_alpha'"),
    (["model.lora.r=0"], "peft refuses this adapter for LlamaPreTrainedModel: .*positive"),
    (["model.lora.r=4", "+model.lora.target_modules=[query]"], "peft refuses this adapter"),
    (["model.lora.path=nowhere"], "nowhere holds no adapter_config.json"),
    (["model.lora.r=4", "+model.lora.use_dora=true"], r"LoraConfig\(use_dora=True\) is not supported"),
    (["model.lora.r=4", "+model.lora.target_modules=[q_proj]", "model.path=mixtral", "scenario=moe_continual",
      "scenario.expert_weights=sharded"],
     "model.lora trains LoRA adapters of rank 4 and leaves experts .* set scenario.expert_weights=replicated"),
])  # fmt: skip
def test_adapters_that_do_not_fit_are_refused(
    folders: dict[str, Path], overrides: list[str], message: str
) -> None:
    pytest.importorskip("peft", reason="peft is not installed: pip install 'dynpipe_ds[peft]'")
    given = [one.replace("=mixtral", f"={folders['mixtral']}") for one in overrides]
    with pytest.raises(ValueError, match=message):
        layers(settings(f"model.path={folders['llama']}", "model.seq_len=16", *given))
