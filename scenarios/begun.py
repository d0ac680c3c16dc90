"""Whether an interrupted run that an output folder holds is the job that is asked for: values only, no ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scenarios.settings import Settings

FOLDER = "checkpoints"
JOB = "job.json"

# What may differ between the two parts of a run; another number of stages needs other values of the second kind.
_FREE = ("output_dir", "run.batches", "run.num_stages", "run.threads", "run.save_every", "run.resume", "run.export",
         "run.validate_every", "run.validate_batches")  # fmt: skip
_OF_STAGES = ("partition_method", "dynamic_partition_method", "deepspeed.dynamic_pipeline.stage_speeds")
# These may differ as long as their product with the replicas, the samples of a batch, is the same.
_OF_BATCH = tuple(
    f"deepspeed.{key}"
    for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
)

_SHOWN = {"scenario": "scenario.name", "scenario_settings": "scenario"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a job is asked to be now.

    Attributes:
        settings: with all decided that was left open.
        num_stages: S.
        num_replicas: of each stage.
        samples: of a batch, over all replicas; ``None``: not known.
    """

    settings: Settings
    num_stages: int
    num_replicas: int
    samples: int | None


def checkpoints_of(settings: Settings) -> Path:
    """The folder in which a job's checkpoints are."""
    return Path(settings.output_dir) / FOLDER


def read(file: Path) -> dict[str, Any] | None:
    """Read what a job has written down of itself, and the tag of its checkpoint.

    Returns:
        Its values; ``None`` if there is no such file.

    Raises:
        ValueError: if the file is damaged.
    """
    if not file.exists():
        return None
    stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    missing = [key for key in ("tag", "settings", "num_stages", "samples", "trained") if key not in stored]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    return stored


def in_words(trained: Mapping[str, int]) -> str:
    """After which batch each run is: ``batch 26``, or ``batch 2 (static) and batch 6 (dynamic)``.

    Args:
        trained: batches of each run, by its name.
    """
    if len(set(trained.values())) == 1:
        return f"batch {next(iter(trained.values()))}"
    return " and ".join(f"batch {count} ({name})" for name, count in trained.items())


def found(settings: Settings) -> dict[str, Any] | None:
    """What an interrupted run in the output folder has written down, if this job would go on from there.

    Returns:
        Its values; ``None`` if there is none, or none that can be read: the ranks say why.
    """
    if settings.run.resume:
        with contextlib.suppress(OSError, ValueError):
            return read(checkpoints_of(settings) / JOB)
    return None


def split_blocks_begun(settings: Settings) -> bool | None:
    """What an interrupted run in the output folder has decided on ``model.split_blocks``; ``None`` without one."""
    stored = found(settings)
    with contextlib.suppress(LookupError, TypeError, AttributeError):
        return None if stored is None else bool(stored["settings"]["model"].get("split_blocks", False))
    return None


def as_values(settings: Settings) -> dict[str, Any]:
    """Settings as values that JSON can hold."""
    values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    return values


def check(stored: Mapping[str, Any], job: Job) -> None:
    """Refuse to go on as another job.

    Args:
        stored: what the interrupted run has written down.
        job: what is asked for now.

    Raises:
        ValueError: with every setting that differs, both values, and the remedy.
    """
    free = _FREE + _OF_BATCH + (_OF_STAGES if stored["num_stages"] != job.num_stages else ())
    differences = _differences(_flat(stored["settings"]), _flat(as_values(job.settings)), free)
    if job.samples is not None and stored["samples"] != job.samples:
        differences.append(
            f"samples a batch were {stored['samples']} and are {job.samples} (change "
            f"ds.gradient_accumulation_steps where the number of replicas, now {job.num_replicas}, differs)"
        )
    trained, batches = max(stored["trained"].values()), job.settings.run.batches
    if trained > batches:
        differences.append(f"{trained} batches are trained and run.batches is {batches}")
    if differences:
        raise ValueError(
            f"{checkpoints_of(job.settings)} holds an interrupted run with other settings: {'; '.join(differences)}. "
            "To continue it, give the settings of then; to start anew, give another output_dir, or run.resume=false, "
            "which discards it"
        )


def expected(settings: Settings, num_ranks: int) -> Job:
    """What a job will be on so many ranks, told before they are started.

    Args:
        settings: the job.
        num_ranks: over all machines.
    """
    num_stages = settings.run.num_stages or num_ranks
    num_replicas = max(1, num_ranks // num_stages)
    config = settings.deepspeed
    sizes = [config.get(key) for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    samples = config.get("train_batch_size")
    if all(isinstance(size, int) for size in sizes):
        samples = sizes[0] * sizes[1] * num_replicas
    return Job(
        settings=settings.decided(num_stages, split_blocks_begun(settings)), num_stages=num_stages,
        num_replicas=num_replicas, samples=samples if isinstance(samples, int) else None,
    )  # fmt: skip


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name nested values by their path; the scenario's settings as the command line has them."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        path = prefix + _SHOWN.get(key, key)
        if not prefix and key.startswith("data_"):  # as a job's file had it before these were one value
            path = f"data.{key.removeprefix('data_')}"
        flat |= _flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return flat


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], free: Sequence[str]) -> list[str]:
    """Name the settings that differ, both values each."""
    return [
        f"{name} was {then.get(name, 'not set')} and is {now.get(name, 'not set')}"
        for name in dict.fromkeys([*then, *now])
        if name not in free and then.get(name) != now.get(name)
    ]
