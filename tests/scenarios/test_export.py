"""``run.export``: the exported weights are the trained ones, bit for bit, wherever layers were."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scenarios.export import load_weights
from scenarios.gpt import GPTConfig, gpt_layers
from scenarios.settings import Settings
from tests.distributed.ranks import run_ranks
from tests.scenarios.test_resume import finish, settings_for

BATCHES = 14


def entry_and_held(rank: int, settings: Settings) -> dict[str, Tensor]:
    """Run the whole entry, and tell which weights this rank's dynamic run had at its end."""
    from scenarios import train

    held: dict[str, Tensor] = {}
    original = train.export

    def noting(engine: Any, scenario: Any, given: Settings) -> None:
        whole = scenario.whole_layers(engine)
        for index, layer in engine.local_layers().items():
            held.update({f"{whole[index]}.{name}": tensor.clone() for name, tensor in layer.state_dict().items()})
        original(engine, scenario, given)

    train.export = noting
    try:
        train.run(settings)
    finally:
        train.export = original
    return held


def exported(settings: Settings, *, ranks: int) -> dict[str, Tensor]:
    """The weights that the entry leaves, which are those that the ranks held."""
    parts = run_ranks(entry_and_held, ranks, settings)
    held = {name: tensor for part in parts for name, tensor in part.items()}
    assert settings.run.export is not None
    weights = load_weights(settings.run.export)
    assert weights.keys() == held.keys()
    assert all(torch.equal(weights[name], held[name]) for name in held)
    results = json.loads((settings.output_dir / "results.json").read_text(encoding="utf-8"))
    assert results["runs"][1]["num_rebalances"] > 0 or ranks == 1, "layers moved"
    return weights


def test_exported_weights_are_the_trained_ones(tmp_path: Path) -> None:
    """After moves on two ranks, and of the undivided model; they fit the GPT's own layers, and are not the first."""
    two = settings_for(tmp_path / "two", batches=BATCHES, run={"export": str(tmp_path / "kept"), "save_every": 0})
    weights = exported(two, ranks=2)
    one = settings_for(
        tmp_path / "one", stages=1, batches=BATCHES, run={"export": str(tmp_path / "kept_1"), "save_every": 0}
    )
    undivided = exported(one, ranks=1)
    assert weights.keys() == undivided.keys()
    assert all(torch.equal(weights[name], undivided[name]) for name in weights)
    described = json.loads((tmp_path / "kept" / "model.json").read_text(encoding="utf-8"))
    config = GPTConfig(**described["model"])
    assert config == two.model and described["scenario"]["name"] == "freezing"
    for index, spec in enumerate(gpt_layers(config)):
        layer = spec.build()
        fresh = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        own = {name.partition(".")[2]: t for name, t in weights.items() if name.partition(".")[0] == str(index)}
        layer.load_state_dict(own, strict=True)
        assert any(not torch.equal(fresh[name], own[name]) for name in own)


def test_names_do_not_depend_on_cut_blocks(tmp_path: Path) -> None:
    whole = settings_for(tmp_path / "whole", batches=4, run={"export": str(tmp_path / "kept"), "save_every": 0})
    halves = replace(
        whole, model=replace(whole.model, split_blocks=True), output_dir=tmp_path / "halves",
        partition_method=[0, 3, 6], run=replace(whole.run, export=str(tmp_path / "kept_halves")),
    )  # fmt: skip
    finish(whole, 2)
    finish(halves, 2)
    weights, cut = load_weights(tmp_path / "kept"), load_weights(tmp_path / "kept_halves")
    assert weights.keys() == cut.keys() and all(torch.equal(weights[name], cut[name]) for name in weights)
    assert len(list((tmp_path / "kept").glob("layer_*.pt"))) == 4
    assert len(list((tmp_path / "kept_halves").glob("layer_*.pt"))) == 6


def test_a_folder_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = settings_for(tmp_path / "out", stages=1, batches=4, run={"export": str(tmp_path / "file" / "kept")})
    from tests.scenarios.test_resume import run_entry

    ended, _ = run_ranks(run_entry, 1, settings)[0]
    assert ended.startswith("ValueError: the model was not exported to") and "another run.export goes on" in ended


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no model.json: give the folder of a finished run.export"):
        load_weights(tmp_path)
    (tmp_path / "model.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="its format is None, not 'scenarios.gpt/1'"):
        load_weights(tmp_path)
