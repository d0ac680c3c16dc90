"""From configuration files to plain settings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from dynpipe_ds.config import DynamicPipelineConfig, parse_config
from dynpipe_ds.partition import partitioner_names
from dynpipe_ds.repacking.config import RepackConfig
from scenarios.data import DataSettings
from scenarios.scenario import build_layers, build_scenario
from scenarios.settings import (
    RunSettings,
    Settings,
    config_folder,
    load_deepspeed_json,
    merge,
)

CONF = config_folder()
DOCS = Path(__file__).parents[2] / "docs"


def names(group: str, ending: str = "yaml") -> list[str]:
    """List the choices in a folder of conf/."""
    return sorted(path.stem for path in (CONF / group).glob(f"*.{ending}"))


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    with initialize_config_dir(config_dir=str(CONF), version_base=None):
        yield


def settings(*overrides: str) -> Settings:
    """Compose the configuration as the entry does."""
    values: Any = OmegaConf.to_container(compose("config", overrides=list(overrides)), resolve=True)
    return Settings.from_mapping(values)


@pytest.mark.parametrize("overrides, num_stages, num_layers", [
    ((), 2, 14), ((), 3, 14), ((), 4, 26), ((), 12, 26),  # 12 blocks
    (("model.split_blocks=false",), 4, 14), (("model.split_blocks=true",), 2, 26),
    (("model.depth=24",), 4, 26), (("model.depth=24",), 8, 50),
    (("partition_method=[0,3,6,9,14]",), 4, 14), (("dynamic_partition_method=[0,3,6,9,14]",), 4, 14),
    (("ds.dynamic_pipeline.pinned_cuts=[4]",), 4, 14),
    (("scenario=mod",), 4, 20),  # half of the blocks are routed around, and stay whole
    (("scenario=early_exit",), 4, 26), (("scenario=moe",), 4, 26), (("scenario=sparse_attention",), 4, 26),
])  # fmt: skip
def test_blocks_are_cut_where_a_stage_has_few(overrides: tuple[str, ...], num_stages: int, num_layers: int) -> None:
    found = settings(*overrides)
    scenario = build_scenario(found.scenario, found.scenario_settings)
    assert len(build_layers(scenario, found.decided(num_stages).model)) == num_layers


def test_a_job_keeps_what_was_decided_when_it_began() -> None:
    for begun in (False, True):
        job = settings().decided(4, begun)
        assert job.model.split_blocks is begun and job.decided(1) == job.decided(12) == job
    assert settings("model.split_blocks=true").decided(2, False).model.split_blocks is True, "and is told of it"
    whole = settings("scenario=mod", "model.depth=4", "scenario.blocks=all").decided(2)
    assert whole.model.split_blocks is False, "all blocks are routed around"


@pytest.mark.parametrize("deepspeed", names("deepspeed_json", "json"))
@pytest.mark.parametrize("model", sorted(set(names("model")) - {"hf"}))  # see tests/hf/test_scenario.py
@pytest.mark.parametrize("scenario", sorted(set(names("scenario")) - {"moe_continual"}))
def test_every_configuration_composes(scenario: str, model: str, deepspeed: str) -> None:
    """Every file of conf/ with every other one: the scenario fits the model, the JSON is valid."""
    found = settings(f"scenario={scenario}", f"model={model}", f"deepspeed={deepspeed}")
    specs = build_layers(build_scenario(found.scenario, found.scenario_settings), found.decided(2).model)
    assert len(specs) == found.model.depth + 2
    for dynamic in (False, True):
        section = parse_config(found.deepspeed_config(dynamic=dynamic))
        assert section.enabled
        assert (section.rebalance_every == "never") is not dynamic
        assert (section.schedule == "1f1b") is not dynamic
    assert found.output_dir == Path("outputs") / scenario


@pytest.mark.parametrize("partition", names("partition"))
def test_every_partition_composes(partition: str) -> None:
    """With what its comment shows, too; the static run stays as it is."""
    text = (CONF / "partition" / f"{partition}.yaml").read_text(encoding="utf-8")
    (shown,) = re.findall(rf"#   … (partition={partition} .*|partition=optimal .*)", text)
    assert f"# … scenarios.train partition={partition}\n" in text
    for overrides in (f"partition={partition}", shown):
        found = settings(*overrides.split())
        assert found.partition_method == "parameters"
        assert parse_config(found.deepspeed_config(dynamic=False)).rebalance_every == "never"
        section = parse_config(found.deepspeed_config(dynamic=True))
        if found.dynamic_partition_method is None:
            assert section.partitioner == overrides.split()[0].removeprefix("partition=")
            assert section.rebalance_every != "never"
        else:
            assert (found.dynamic_partition_method, section.rebalance_every) == (partition, "never")


def test_every_partitioner_is_a_choice() -> None:
    assert set(partitioner_names()) <= set(names("partition"))


def test_a_users_json_decides_unless_a_partition_is_chosen(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"dynamic_pipeline": {"partitioner": "diffusion", "rebalance_every": 7}}))
    for overrides, expected in ([], ("diffusion", 7)), (["partition=optimal"], ("optimal", "auto")):
        section = settings(f"deepspeed={path}", *overrides).deepspeed_config(dynamic=True)["dynamic_pipeline"]
        assert (section["partitioner"], section["rebalance_every"]) == expected


@pytest.mark.parametrize("experiment", names("experiment"))
def test_every_experiment_composes(experiment: str) -> None:
    """It opens with its command and its claim, which the documentation lists; what it shows is accepted."""
    text = (CONF / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
    module = "repack" if experiment.startswith("repack") else "train"
    assert text.startswith(f"# @package _global_\n# python -m scenarios.{module} experiment={experiment}\n")
    examples = re.findall(rf"#   … (?:--multirun )?(experiment={experiment} .*)", text)
    assert examples
    for overrides in (f"experiment={experiment}", *examples):
        found = settings(*(word.replace("'", "").split(",a" if "[" in word else ",")[0] for word in overrides.split()))
        build_layers(build_scenario(found.scenario, found.scenario_settings), found.model)
        assert parse_config(found.deepspeed_config(dynamic=True)).enabled
        assert not parse_config(found.deepspeed_config(dynamic=False)).repack.enabled
        assert found.output_dir == Path("outputs") / experiment
    comment = " ".join(line[2:] for line in text.splitlines()[2:] if re.match("# [^ ]", line))
    claim, source = re.match(r"(.*?) \((README|docs/\w+\.md)\)\.", comment).groups()  # type: ignore[union-attr]
    source = "[README](../README.md)" if source == "README" else f"[{Path(source).name}]({Path(source).name})"
    row = f"| [`{experiment}`](../conf/experiment/{experiment}.yaml) | {claim} ({source}). |\n"
    assert row in (DOCS / "experiments.md").read_text(encoding="utf-8")


def test_the_documentation_lists_no_other_experiment() -> None:
    text = (DOCS / "experiments.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\| \[`(\w+)`\]\(\.\./conf/experiment", text)) == names("experiment")


def test_every_key_of_the_section_is_an_override_without_plus() -> None:
    section = compose("config").ds.dynamic_pipeline
    # Scenarios' jobs start all their ranks, and end with them.
    assert set(section) == set(DynamicPipelineConfig.model_fields) - {"enabled", "survive", "elastic"}
    assert set(section.repack) == set(RepackConfig.model_fields)


def test_environment_variables_are_documented() -> None:
    """Those that any code here reads or sets."""
    name = r"environ(?:\.\w+\(|\[)\"([A-Z_]+)\"|\"([A-Z_]+)\" (?:not )?in os\.environ"
    root = DOCS.parent
    files = [file for folder in ("dynpipe_ds", "scenarios", "tests") for file in (root / folder).rglob("*.py")]
    found = {one or other for file in files for one, other in re.findall(name, file.read_text(encoding="utf-8"))}
    documented = set(re.findall(r"`([A-Z_]+)", (DOCS / "experiments.md").read_text(encoding="utf-8")))
    assert "OMP_NUM_THREADS" in found and found <= documented


@pytest.mark.parametrize("scenario", names("scenario"))
def test_scenarios_say_how_to_run_them(scenario: str) -> None:
    """The first comment is the command; an example of an override follows."""
    text = (CONF / "scenario" / f"{scenario}.yaml").read_text(encoding="utf-8")
    comment = re.match(r"(#.*\n)+", text)
    assert comment is not None
    assert comment[0].startswith(f"# python -m scenarios.train scenario={scenario}\n")
    assert f"… scenario={scenario} " in comment[0]


@pytest.mark.parametrize(
    "example",
    [
        "scenario=none run.batches=20 partition_method=[0,4,14]",
        "scenario=freezing scenario.batches=[10,30] scenario.frozen=[3,0.5]",
        "scenario=freezing scenario.cache=true data.shuffle=once data.max_tokens=24577",
        "scenario=freezing_egeria scenario.tolerance=0.1 scenario.evaluate_every=5",
        "scenario=freezing_autofreeze scenario.evaluate_every=8 scenario.percentile=25",
        "data=text data.path=tokens.bin data.dtype=uint16 model.vocab_size=50257",
        "run.validate_every=20 run.validate_batches=null data.validation=0.05 data.validation_by=end",
        "ds.gradient_accumulation_steps=4 +ds.optimizer.params.lr=3e-4",
        "scenario=freezing_egeria model.depth=24 deepspeed=zero1_adamw partition=diffusion run.batches=40",
        "ds.dynamic_pipeline.repack.release.backend=slurm",
    ],
)
def test_examples_of_the_comments_work(example: str) -> None:
    """Each override that a comment shows is accepted."""
    settings(*example.split())


@pytest.mark.parametrize("data", names("data"))
def test_every_kind_of_data_composes(data: str) -> None:
    """Each opens with its command; that and what its comments show is accepted; every setting is listed."""
    text = (CONF / "data" / f"{data}.yaml").read_text(encoding="utf-8")
    commands = re.findall(rf"# +… (?:scenarios\.train )?(data={data}.*)", text)
    assert text.startswith(f"# … scenarios.train data={data}") and len(commands) == 2
    for command in commands:
        found = settings(*command.split())
        assert found.data.path == dict(pair.split("=") for pair in command.split()).get("data.path")
        assert data == "text" or found.data.format == data
    assert set(re.findall(r"^(\w+):", text, re.MULTILINE)) == {field.name for field in fields(DataSettings)}


def test_all_sections_are_checked_at_once() -> None:
    """One message names what is wrong in the model, the run and the data."""
    with pytest.raises(ValueError) as raised:
        settings("model.heads=3", "run.batches=0", "run.validate_batches=0", "data.validation=2", "data.shuffle=no")
    for part in (
        "model: heads=3 must divide", "run.batches=0 must be at least 1", "run.validate_batches=0 must be at least 1",
        "data.validation=2 must be a share", "data.shuffle=", "must be one of every_epoch, once",
    ):  # fmt: skip
        assert part in str(raised.value)


def test_deepspeed_json_is_read_as_it_is_and_can_be_overridden(tmp_path: Path) -> None:
    """The user's own file, plus keys from the command line; the file is not changed."""
    content = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "SGD", "params": {}}}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert settings(f"deepspeed={path}").deepspeed == content
    changed = settings(
        f"deepspeed={path}",
        "ds.train_micro_batch_size_per_gpu=1",
        "+ds.optimizer.params.lr=0.5",
        "ds.dynamic_pipeline.rebalance_every=4",
    )
    assert changed.deepspeed == {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
        "dynamic_pipeline": {"rebalance_every": 4},
    }
    assert changed.deepspeed_config(dynamic=True)["dynamic_pipeline"] == {
        "rebalance_every": 4,
        "enabled": True,
        "journal": "outputs/freezing/journal/dynamic",
    }


def test_deepspeed_files_that_cannot_be_read(tmp_path: Path) -> None:
    """The message names the file and the choices."""
    with pytest.raises(ValueError, match="nowhere is neither a JSON file nor one of .*fp32_adamw"):
        load_deepspeed_json("nowhere")
    broken = tmp_path / "broken.json"
    broken.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="broken.json is not valid JSON"):
        load_deepspeed_json(str(broken))
    broken.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match="must hold a JSON object, not list"):
        load_deepspeed_json(str(broken))


def test_merge() -> None:
    """Sections are merged, values replaced, None and empty sections leave what is there."""
    base = {"a": 1, "b": {"c": 2, "d": [1, 2]}}
    assert merge(base, {"a": None, "b": {"c": 3, "d": None}, "e": {"f": None}}) == {
        "a": 1,
        "b": {"c": 3, "d": [1, 2]},
    }
    assert merge(base, {"b": {"d": [9]}, "e": {"f": 1}})["b"]["d"] == [9]
    assert base == {"a": 1, "b": {"c": 2, "d": [1, 2]}}


def test_windows_cover_every_batch_once() -> None:
    """The warm-up is a window of its own; the last window may be shorter."""
    run = RunSettings(batches=11, window=4, warmup_batches=2)
    assert run.windows() == [range(2), range(2, 6), range(6, 10), range(10, 11)]
    assert RunSettings(batches=3, window=8, warmup_batches=0).windows() == [range(3)]


def test_lengths_without_a_meaning() -> None:
    """All problems in one message."""
    with pytest.raises(ValueError, match="run.batches=0 .*; run.window=0"):
        RunSettings(batches=0, window=0)
    with pytest.raises(ValueError, match="warmup_batches=5 must be less than run.batches=5"):
        RunSettings(batches=5, warmup_batches=5)
    with pytest.raises(ValueError, match="run.save_every=-1 must be at least 0"):
        RunSettings(save_every=-1)


def test_unknown_keys_are_named() -> None:
    """A key that Hydra was made to accept with + is still checked; all at once."""
    with pytest.raises(ValueError) as raised:
        settings("+model.widht=3", "+ruin.batches=3", "+run.windows=4")
    for part in (
        "model.widht is not a setting: choose one of depth, ", "ruin is not a setting: did you mean 'run'? choose",
        "run.windows is not a setting: did you mean 'window'?",
    ):  # fmt: skip
        assert part in str(raised.value)


def test_types_are_checked_and_all_problems_told_at_once() -> None:
    with pytest.raises(ValueError) as raised:
        settings(
            "seed=soon", "run.batches=1.5", "run.resume=maybe", "model.positions=round", "partition_method=[0,x]",
            "data.validation=all", "deepspeed=nope", "ds.gradient_accumulation_steps=0",
        )  # fmt: skip
    for part in (
        "seed='soon' must be a whole number", "run.batches=1.5 must be a whole number",
        "run.resume='maybe' must be true or false", "model.positions='round' must be one of learned, rotary",
        "partition_method=[0, 'x'] must be a text or a list, each a whole number",
        "data.validation='all' must be a number", "ds.gradient_accumulation_steps=0 must be a whole number of at",
        "deepspeed=nope is neither a JSON file nor one of bf16_zero1, fp32_adamw, zero1_adamw",
    ):  # fmt: skip
        assert part in str(raised.value)


def test_live_metrics_of_the_two_runs_do_not_mix(tmp_path: Path) -> None:
    """In the output folder, or where the user says."""
    found = settings("+ds.csv_monitor.enabled=true", f"output_dir={tmp_path}")
    folders = [found.deepspeed_config(dynamic=dynamic)["csv_monitor"] for dynamic in (False, True)]
    assert [(one["output_path"], one["job_name"]) for one in folders] == [
        (str(tmp_path / "csv_monitor"), "static"), (str(tmp_path / "csv_monitor"), "dynamic"),
    ]  # fmt: skip
    journals = [found.deepspeed_config(dynamic=dynamic)["dynamic_pipeline"]["journal"] for dynamic in (False, True)]
    assert journals == [str(tmp_path / "journal" / label) for label in ("static", "dynamic")]
    given = settings("ds.dynamic_pipeline.journal=told").deepspeed_config(dynamic=True)
    assert given["dynamic_pipeline"]["journal"] == "told/dynamic"
    mine = settings("+ds.tensorboard={enabled: true, output_path: logs, job_name: mine}").deepspeed_config(dynamic=True)
    assert mine["tensorboard"] == {"enabled": True, "output_path": "logs", "job_name": "mine_dynamic"}
    assert "csv_monitor" not in mine
