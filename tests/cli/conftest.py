"""A folder with what the examples name: a model, a profile, a DeepSpeed JSON."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynpipe_ds import LayerProfile, PipelineProfile
from dynpipe_ds.cli.main import main

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
