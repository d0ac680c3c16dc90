"""The settings of one training job, as plain values: what the entry makes of its configuration."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from scenarios.checking import choices, read, type_problems
from scenarios.data import DataSettings
from scenarios.gpt import GPTConfig
from scenarios.pretrained import PretrainedModel
from scenarios.scenario import build_scenario, can_split_blocks

SECTION = "dynamic_pipeline"

_OF_DECISIONS = ("first_batch", "last_batch", "horizon_batches", "activation_budget")  # contradict "never" and "1f1b"
_MONITORS = ("tensorboard", "csv_monitor")  # those that write into a folder


def config_folder() -> Path:
    """Find ``conf/``, which is beside this package."""
    return Path(__file__).resolve().parents[1] / "conf"


def load_deepspeed_json(name: str) -> dict[str, Any]:
    """Read a DeepSpeed JSON file as it is.

    Args:
        name: a path, or the name of a file in ``conf/deepspeed_json`` without its ending.

    Returns:
        The file's content.

    Raises:
        ValueError: if there is no such file, or it holds no JSON object.
    """
    shipped = config_folder() / "deepspeed_json"
    candidates = [Path(name).expanduser(), shipped / f"{name}.json"]
    path = next((candidate for candidate in candidates if candidate.is_file()), None)
    if path is None:
        known = ", ".join(sorted(file.stem for file in shipped.glob("*.json")))
        raise ValueError(f"deepspeed={name} is neither a JSON file nor one of {known}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"deepspeed={path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"deepspeed={path} must hold a JSON object, not {type(content).__name__}")
    return content


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes`` laid over it, section by section; ``None`` is no change."""
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        if isinstance(value, Mapping):
            present = merged.get(key)
            inner = merge(present if isinstance(present, Mapping) else {}, value)
            if inner or isinstance(present, Mapping):
                merged[key] = inner
        elif value is not None:
            merged[key] = copy.deepcopy(value)
    return merged


_LEAST = {
    "batches": 1, "window": 1, "warmup_batches": 0, "save_every": 0, "validate_every": 0, "validate_batches": 1,
}  # fmt: skip


FEW_BLOCKS = 3
"""Where a stage has no more blocks than these, cutting each into attention and MLP pays (docs/finer_layers.md)."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How long the job runs and how it is measured.

    Attributes:
        batches: batches that each of the two runs trains.
        window: batches that one run trains before the other has its turn.
        warmup_batches: first batches that are trained but not timed.
        num_stages: pipeline stages; ``None`` for all ranks.
        threads: CPU threads a rank; ``None`` for ``OMP_NUM_THREADS``, else an equal share of the
            cores.
        save_every: batches of each run between two checkpoints of both, which are written when both have had
            their turn; 0 for none but when the run is asked to end.
        resume: continue an interrupted run that is found in the output folder; ``False`` discards it.
        validate_every: batches of a run between two evaluations of the validation part; 0 for the end alone.
        validate_batches: batches of the validation part that are evaluated, spread evenly; ``None`` for all.
        export: folder for the trained model, which must be empty or new; ``None``: the model is not kept.
    """

    batches: int = 62
    window: int = 6
    warmup_batches: int = 2
    num_stages: int | None = None
    threads: int | None = None
    save_every: int = 12
    resume: bool = True
    validate_every: int = 0
    validate_batches: int | None = None
    export: str | None = None

    def __post_init__(self) -> None:
        """Refuse lengths without a meaning, all problems at once."""
        problems = [
            f"run.{name}={getattr(self, name)} must be at least {least}"
            for name, least in _LEAST.items()
            if getattr(self, name) is not None and getattr(self, name) < least
        ]
        if not problems and self.warmup_batches >= self.batches:
            problems.append(
                f"run.warmup_batches={self.warmup_batches} must be less than "
                f"run.batches={self.batches}, or nothing is timed"
            )
        if problems:
            raise ValueError("; ".join(problems))

    def windows(self) -> list[range]:
        """Cut the batches into windows; the first is the warm-up, if any."""
        starts = range(self.warmup_batches, self.batches, self.window)
        timed = [range(start, min(start + self.window, self.batches)) for start in starts]
        return [range(self.warmup_batches), *timed] if self.warmup_batches else timed


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training job.

    Attributes:
        model: size and kind of the GPT, or a model folder.
        scenario: name of the dynamism.
        scenario_settings: its keyword arguments.
        data: what it trains on.
        deepspeed: the DeepSpeed configuration, with its ``dynamic_pipeline`` section.
        partition_method: the static partition, where the dynamic one starts from.
        dynamic_partition_method: where it starts instead; ``None`` for there.
        run: lengths and measurement.
        seed: of weights and data.
        output_dir: folder for results.
    """

    model: GPTConfig | PretrainedModel
    scenario: str
    scenario_settings: Mapping[str, Any]
    data: DataSettings
    deepspeed: Mapping[str, Any]
    partition_method: str | list[int]
    run: RunSettings
    seed: int
    output_dir: Path
    dynamic_partition_method: str | list[int] | None = None

    @classmethod
    def from_mapping(cls, config: Mapping[str, Any]) -> Settings:
        """Read the resolved configuration of ``conf/config.yaml``.

        Raises:
            ValueError: if a value does not fit, with the value, the rule and a remedy.
        """
        problems = [
            f"{name} is not a setting: {choices(name, list(_KEYS))}" for name in config if name not in _KEYS
        ]
        problems += type_problems("", cls, {name: config[name] for name in _PLAIN})
        model: type[GPTConfig] | type[PretrainedModel] = PretrainedModel if "path" in config["model"] else GPTConfig
        sections: dict[str, Any] = {
            name: read(name, section, config[name], problems)
            for name, section in (("model", model), ("run", RunSettings), ("data", DataSettings))
        }
        problems += [
            f"ds.{name}={value!r} must be a whole number of at least 1, or null"
            for name, value in config["ds"].items()
            if name in _SIZES and value is not None and (type(value) is not int or value < 1)
        ]
        try:
            base = load_deepspeed_json(str(config["deepspeed"]))
        except ValueError as error:
            problems.append(str(error))
        if problems:
            raise ValueError("; ".join(problems))
        scenario = dict(config["scenario"])
        return cls(
            **sections,
            scenario=str(scenario.pop("name")),
            scenario_settings=scenario,
            deepspeed=merge(base, config["ds"]),
            output_dir=Path(config["output_dir"]),
            **{name: config[name] for name in _PLAIN},
        )

    def decided(self, num_stages: int, begun: bool | None = None) -> Settings:
        """Return the same job for so many stages, with all decided that was left open: whether blocks are cut.

        They stay whole where the job names layers by number, which it would do for whole blocks.

        Args:
            num_stages: S.
            begun: what was decided when the job began, on other stages perhaps; ``None``: it begins now.
        """
        if self.model.split_blocks != "auto":
            return self
        section = self.deepspeed.get(SECTION, {})
        by_number = (self.partition_method, self.dynamic_partition_method, section.get("pinned_cuts") or None)
        if begun is None:
            scenario = build_scenario(self.scenario, self.scenario_settings)
            begun = (
                self.model.depth <= FEW_BLOCKS * num_stages and not any(isinstance(one, list) for one in by_number)
                and can_split_blocks(scenario, self.model)
            )  # fmt: skip
        return replace(self, model=replace(self.model, split_blocks=begun))

    def deepspeed_config(self, *, dynamic: bool) -> dict[str, Any]:
        """Return DeepSpeed's configuration for the dynamic run, or for the static one.

        Both use the same engine and measure alike; only the dynamic one moves layers, plans orders or gives ranks back.
        """
        label = "dynamic" if dynamic else "static"
        given = self.deepspeed.get(SECTION, {}).get("journal")
        journal = Path(given or self.output_dir / "journal") / label  # a folder for each run
        config = merge(
            self.deepspeed, {SECTION: {"enabled": True, "journal": str(journal)}} | self._monitors(label)
        )
        if not dynamic:
            own = {"rebalance_every": "never", "schedule": "1f1b", "repack": {"enabled": False}}
            section = merge(config[SECTION], own)
            config[SECTION] = {name: value for name, value in section.items() if name not in _OF_DECISIONS}
        return config

    def profiling_every_batch(self) -> Settings:
        """Return the same job with a profile of every batch, for what tells of each one."""
        return replace(self, deepspeed=merge(self.deepspeed, {SECTION: {"profile_every": 1}}))

    def _monitors(self, label: str) -> dict[str, Any]:
        """Give each run's live metrics a folder of their own, in the output folder unless the user names another."""
        changes = {}
        for monitor in _MONITORS:
            given = self.deepspeed.get(monitor)
            if isinstance(given, Mapping) and given.get("enabled"):
                job = given.get("job_name")
                changes[monitor] = {
                    "output_path": given.get("output_path") or str(self.output_dir / monitor),
                    "job_name": f"{job}_{label}" if job else label,
                }
        return changes


_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")  # DeepSpeed only asserts what they are
_PLAIN = ("seed", "partition_method", "dynamic_partition_method")
_KEYS = (*(field.name for field in fields(Settings) if field.name != "scenario_settings"), "ds", "launch")
"""What ``conf/config.yaml`` holds: ``ds`` is laid over ``deepspeed``, ``launch`` is for who starts the ranks."""
