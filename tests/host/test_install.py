"""The one place where dynpipe_ds reaches into DeepSpeed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from torch import nn

from dynpipe_ds import DynamicPipelineEngine, DynamicPipelineModule, _deepspeed
from dynpipe_ds._versions import DEEPSPEED_RANGE, LEAST_DEEPSPEED
from dynpipe_ds.cli.checks import check_versions
from dynpipe_ds.host import names

INSTALL = rf"Install a supported release: pip install '{re.escape(DEEPSPEED_RANGE)}'"
REMEDY = rf"which dynpipe_ds needs\. {INSTALL}"


def test_the_installed_deepspeed_has_all_we_need() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _deepspeed.check_version()


def test_a_method_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(deepspeed.PipelineEngine, "_exec_load_micro_batch")
    monkeypatch.delattr(deepspeed.PipelineModule, "_set_bounds")
    named = r"deepspeed:PipelineEngine\._exec_load_micro_batch, deepspeed:PipelineModule\._set_bounds, "
    with pytest.raises(_deepspeed.DeepSpeedVersionError, match=named + REMEDY):
        _deepspeed.check_version()


@pytest.mark.parametrize("owner", ["deepspeed.runtime.nowhere:Optimizer", "deepspeed:NoSuchEngine"])
def test_a_module_or_class_that_is_gone(monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    monkeypatch.setitem(names.NEEDED, owner, names.Needed(("step",)))
    with pytest.raises(_deepspeed.DeepSpeedVersionError, match=rf"has no {owner}, {REMEDY}"):
        _deepspeed.check_version()


@pytest.mark.parametrize("version", ["0.20.0", "1.0", "0.190.1"])
def test_another_series_is_a_warning(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.warns(UserWarning, match=r"tested with DeepSpeed 0\.19\.x; .* has every name it needs"):
        _deepspeed.check_version()


@pytest.mark.parametrize("version", ["0.18.9+cpu", "0.19.0", "0.19.1", "0.19.2"])
def test_a_release_whose_gradients_are_wrong_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Value, rule, remedy; the doctor says the same."""
    monkeypatch.setattr(deepspeed, "__version__", version)
    rule = rf"is older than {re.escape(LEAST_DEEPSPEED)}, the first release whose pipeline gradients are right .*"
    with pytest.raises(_deepspeed.DeepSpeedVersionError, match=rf"DeepSpeed {re.escape(version)} {rule}\. {INSTALL}"):
        _deepspeed.check_version()
    (check,) = (check for check in check_versions() if check.name == "deepspeed")
    assert check.status == "problem" and re.search(rule, check.found) and DEEPSPEED_RANGE in check.remedy


@pytest.mark.parametrize("started", ["script", "command line"])
def test_training_is_refused_and_the_doctor_runs(tmp_path: Path, started: str) -> None:
    """With a DeepSpeed that says that it is old."""
    (tmp_path / "sitecustomize.py").write_text(_OLD, encoding="utf-8")
    command = ["-c", "import dynpipe_ds"] if started == "script" else ["-m", "dynpipe_ds", "doctor", "--json"]
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, *command], env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), root])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    if started == "script":
        assert "DeepSpeedVersionError: DeepSpeed 0.19.2 is older than" in done.stderr
    else:
        assert "is older than" in done.stdout and '"extensions"' in done.stdout


_OLD = """
import builtins
original = builtins.__import__

def importing(name, *args, **kwargs):
    module = original(name, *args, **kwargs)
    if name == "deepspeed":
        module.__version__ = "0.19.2"
    return module

builtins.__import__ = importing
"""


def allocate(engine_class: type, model: Any) -> type:
    """The class that ``engine_class(model=model)`` would construct."""
    return type(engine_class.__new__(engine_class, args=None, model=model))


def test_only_our_module_gets_our_engine() -> None:
    ours = DynamicPipelineModule.__new__(DynamicPipelineModule)
    theirs = deepspeed.PipelineModule.__new__(deepspeed.PipelineModule)
    assert allocate(deepspeed.PipelineEngine, ours) is DynamicPipelineEngine
    for model in (theirs, nn.Module(), SimpleNamespace(), None):
        assert allocate(deepspeed.PipelineEngine, model) is deepspeed.PipelineEngine
    assert issubclass(DynamicPipelineEngine, deepspeed.PipelineEngine)


def test_subclasses_of_the_engine_stay_what_they_are() -> None:
    class Mine(deepspeed.PipelineEngine):  # type: ignore[misc]
        pass

    ours = DynamicPipelineModule.__new__(DynamicPipelineModule)
    assert allocate(Mine, ours) is Mine
    assert allocate(DynamicPipelineEngine, ours) is DynamicPipelineEngine


def test_an_own_engine_that_cannot_be_dynamic_is_refused() -> None:
    class Mine(deepspeed.PipelineEngine):  # type: ignore[misc]
        pass

    class Ours(DynamicPipelineEngine):
        pass

    model = DynamicPipelineModule.__new__(DynamicPipelineModule)
    for enabled in (False, True):
        config = SimpleNamespace(_param_dict={"dynamic_pipeline": {"enabled": enabled}})
        assert type(Ours.__new__(Ours, model=model, config_class=config)) is Ours
        if not enabled:
            assert type(Mine.__new__(Mine, model=model, config_class=config)) is Mine
            continue
        remedy = r"derive it from dynpipe_ds\.DynamicPipelineEngine"
        with pytest.raises(ValueError, match=rf"engine Mine derives from DeepSpeed's PipelineEngine, .* {remedy}"):
            Mine.__new__(Mine, model=model, config_class=config)
