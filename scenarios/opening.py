"""What a run says before anything trains: its ranks, its model, its folder and what it replaces there."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from scenarios.begun import Job, found, in_words
from scenarios.gpt import GPTConfig
from scenarios.pretrained import PretrainedModel
from scenarios.settings import Settings

RESULTS = (
    "results.json", "table.txt", "stage_times.png", "workers.png", "report.html",
    "journal/static/report.html", "journal/dynamic/report.html",
)  # fmt: skip
"""What a finished run, and the reports on it, leave in its output folder."""

TOLD = "SCENARIOS_TOLD"
"""Environment variable of ranks whose starter has said the opening lines already."""


def opening(job: Job, num_ranks: int, *, resumes: bool) -> str:
    """The first lines of a run.

    Args:
        job: what is trained.
        num_ranks: over all machines.
        resumes: whether the entry goes on with an interrupted run.
    """
    settings = job.settings
    replicas = f" x {job.num_replicas} replicas" if job.num_replicas > 1 else ""
    lines = [
        f"ranks:  {num_ranks} ({job.num_stages} pipeline stages{replicas})",
        f"model:  {_model(settings)}; scenario: {settings.scenario}; batches: {settings.run.batches}",
        f"output: {settings.output_dir}{_finds(settings, resumes=resumes)}",
    ]
    if settings.run.export is not None:
        lines.append(f"export: {settings.run.export}")
    return "\n".join(lines)


def _model(settings: Settings) -> str:
    model = settings.model
    halves = ", each cut into attention and MLP" if model.split_blocks is True else ""
    if isinstance(model, PretrainedModel):
        kind = type(model.config).__name__.removesuffix("Config")
        adapters = "" if model.adapters is None else f", {model.adapters}"
        return f"{kind} of {model.path}, {model.depth} blocks{halves}{adapters}"
    assert isinstance(model, GPTConfig)
    return f"GPT, {model.depth} blocks{halves}, hidden {model.hidden}, {model.seq_len} tokens"


def _finds(settings: Settings, *, resumes: bool) -> str:
    """What becomes of what is in the output folder."""
    stored = found(settings) if resumes else None
    if stored is not None:
        return f" (continues the run that was interrupted there after {in_words(stored['trained'])})"
    files = results_in(Path(settings.output_dir))
    if not files:
        return ""
    newest = max(file.stat().st_mtime for file in files)
    when = datetime.fromtimestamp(newest).strftime("%Y-%m-%d %H:%M")
    return f" (replaces the results of {when}: {', '.join(file.name for file in files)})"


def results_in(folder: Path) -> list[Path]:
    """Files of an earlier run in an output folder."""
    return [folder / name for name in RESULTS if (folder / name).is_file()]


def clear(folder: Path) -> None:
    """Remove the results of an earlier run, and the report on them: none may be taken for this run's."""
    for file in results_in(folder):
        file.unlink()


def was_told() -> bool:
    """Whether the process that started this rank has said the opening lines."""
    return TOLD in os.environ
