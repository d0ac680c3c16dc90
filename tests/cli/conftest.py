"""A folder with what the examples name: a model, a profile, a DeepSpeed JSON, a finished job."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynpipe_ds import PipelineProfile, RebalanceEvent
from dynpipe_ds.cli.main import main
from dynpipe_ds.measure.profile import LayerProfile
from dynpipe_ds.reporting.table import RunSummary
from scenarios.recording import new_recording, record_profile, record_rebalance

NUM_BATCHES, FROZEN_AT, MOVED_AT = 24, 8, 12
MODEL = Path(__file__).with_name("my_model.py")


class Done(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output, which must be nothing but JSON."""
        return json.loads(self.out)


Command = Callable[..., Done]


@pytest.fixture
def dynpipe(capsys: pytest.CaptureFixture[str]) -> Command:
    """Run ``dynpipe`` with some arguments in this process."""

    def run(*arguments: object) -> Done:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as left:  # argparse
            code = int(left.code or 0)
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the test, with the files."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(MODEL, tmp_path)
    example_profile().save("profile.json")
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, "dynamic_pipeline": {"enabled": True},
    }  # fmt: skip
    Path("ds_config.json").write_text(json.dumps(config), encoding="utf-8")
    write_job("outputs/freezing")
    return tmp_path


def example_profile(
    forward_s: tuple[float, ...] = (1, 2, 1, 2, 1, 2, 1, 2), boundaries: tuple[int, ...] = ()
) -> PipelineProfile:
    """Layers that take some milliseconds forward and twice that backward; layer i has 100 (i + 1) parameters."""
    layers = [
        LayerProfile(f"Layer{i - 1}", f / 1e3, 2 * f / 1e3, 100 * i, 400 * i, 400 * i, 800 * i, 1000)
        for i, f in enumerate(forward_s, start=1)
    ]
    return PipelineProfile(0, boundaries, 4, tuple(layers), ())


def job_profile(batch: int, boundaries: tuple[int, ...]) -> PipelineProfile:
    """Layers of 1 ms and 2 ms; the first four have no backward from the batch where they are frozen."""
    profile = example_profile((1.0,) * 8, boundaries)
    frozen = 4 if batch >= FROZEN_AT else 0
    layers = [
        dataclasses.replace(layer, backward_s=0.0 if i < frozen else layer.backward_s)
        for i, layer in enumerate(profile.layers)
    ]
    return dataclasses.replace(profile, layers=tuple(layers))


def write_job(folder: str, *, recorded: bool = True) -> dict[str, Any]:
    """Write results as the training entry does; the machine takes twice as long from the move on."""
    runs = []
    for label in ("static", "dynamic"):
        recording = new_recording()
        stages_s, batches_s = [], []
        for batch in range(NUM_BATCHES):
            moved = label == "dynamic" and batch >= MOVED_AT
            profile = job_profile(batch, (0, 5, 8) if moved else (0, 4, 8))
            record_profile(recording, batch, profile)
            slowness = 2.0 if batch >= MOVED_AT else 1.0
            busy_s = [4 * slowness * s for s in profile.stage_seconds()]
            stages_s.append(busy_s)
            batches_s.append(max(busy_s) + 0.001)
        moves = [MOVED_AT - 1] if label == "dynamic" else []
        if moves:
            event = RebalanceEvent(MOVED_AT, (0, 4, 8), (0, 5, 8), 0.25, 2**20, 0.001, 0.002)
            record_rebalance(recording, event)
        summary = RunSummary(
            label=label, tokens=NUM_BATCHES * 64, seconds=sum(batches_s), losses=tuple(3.0 - i / 10 for i in range(24)),
            boundaries=(0, 5, 8) if moves else (0, 4, 8), bubble_ratio=0.3, num_rebalances=len(moves),
        )
        values = dataclasses.asdict(summary) | {
            "tokens_per_s": summary.tokens_per_s, "batches_s": batches_s, "stages_s": stages_s, "rebalanced_at": moves,
        }
        runs.append(values | ({"recording": recording} if recorded else {}))
    settings = {
        "scenario": "freezing", "model": {"seq_len": 32},
        "deepspeed": {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
    }  # fmt: skip
    results = {"settings": settings, "environment": {"ranks": 2}, "runs": runs}
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return results
