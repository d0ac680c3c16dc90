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

from dynpipe_ds import DynamicPipelineEngine, DynamicPipelineModule
from dynpipe_ds._versions import DEEPSPEED_RANGE, LEAST_DEEPSPEED
from dynpipe_ds.cli.checks import check_versions
from dynpipe_ds.engine import EnabledEngine
from dynpipe_ds.host import install, names
from dynpipe_ds.host.hooks import Hooks, check_hooks

INSTALL = rf"Install a supported release: pip install '{re.escape(DEEPSPEED_RANGE)}'"
REMEDY = rf"which dynpipe_ds needs\. {INSTALL}"


def test_the_installed_deepspeed_has_all_we_need() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        install.check_version()


def test_a_method_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(deepspeed.PipelineEngine, "_exec_load_micro_batch")
    monkeypatch.delattr(deepspeed.PipelineModule, "_set_bounds")
    named = r"deepspeed:PipelineEngine\._exec_load_micro_batch, deepspeed:PipelineModule\._set_bounds, "
    with pytest.raises(install.DeepSpeedVersionError, match=named + REMEDY):
        install.check_version()


@pytest.mark.parametrize("owner", ["deepspeed.runtime.nowhere:Optimizer", "deepspeed:NoSuchEngine"])
def test_a_module_or_class_that_is_gone(monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    monkeypatch.setitem(names.NEEDED, owner, names.Needed(("step",)))
    with pytest.raises(install.DeepSpeedVersionError, match=rf"has no {owner}, {REMEDY}"):
        install.check_version()


@pytest.mark.parametrize("version", ["0.20.0", "1.0", "0.190.1"])
def test_another_series_is_a_warning(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    with pytest.warns(UserWarning, match=r"tested with DeepSpeed 0\.19\.x; .* has every name it needs"):
        install.check_version()


@pytest.mark.parametrize("version", ["0.18.9+cpu", "0.19.0", "0.19.1", "0.19.2"])
def test_a_release_whose_gradients_are_wrong_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Value, rule, remedy; the doctor says the same."""
    monkeypatch.setattr(deepspeed, "__version__", version)
    rule = rf"is older than {re.escape(LEAST_DEEPSPEED)}, the first release whose pipeline gradients are right .*"
    with pytest.raises(install.DeepSpeedVersionError, match=rf"DeepSpeed {re.escape(version)} {rule}\. {INSTALL}"):
        install.check_version()
    (check,) = (check for check in check_versions() if check.name == "deepspeed")
    assert check.status == "problem" and re.search(rule, check.found) and DEEPSPEED_RANGE in check.remedy


@pytest.mark.parametrize("started", ["script", "command line"])
def test_training_is_refused_and_the_doctor_runs(tmp_path: Path, started: str) -> None:
    """With a DeepSpeed that says that it is old."""
    (tmp_path / "sitecustomize.py").write_text(_OLD, encoding="utf-8")
    command = ["-c", "import dynpipe_ds"] if started == "script" else ["-m", "dynpipe_ds", "doctor", "--json"]
    root = str(Path(__file__).parents[2])
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


def allocate(engine_class: type, model: Any, *, enabled: bool = True) -> type:
    """The class that ``engine_class(model=model)`` would construct."""
    config = SimpleNamespace(_param_dict={"dynamic_pipeline": {"enabled": enabled}})
    return type(engine_class.__new__(engine_class, args=None, model=model, config_class=config))


def test_only_our_module_gets_our_engine() -> None:
    ours = DynamicPipelineModule.__new__(DynamicPipelineModule)
    theirs = deepspeed.PipelineModule.__new__(deepspeed.PipelineModule)
    assert allocate(deepspeed.PipelineEngine, ours) is EnabledEngine
    for model in (theirs, nn.Module(), SimpleNamespace(), None):
        assert allocate(deepspeed.PipelineEngine, model) is deepspeed.PipelineEngine
    assert issubclass(DynamicPipelineEngine, deepspeed.PipelineEngine)


def test_without_the_section_none_of_deepspeeds_methods_is_replaced() -> None:
    ours = DynamicPipelineModule.__new__(DynamicPipelineModule)
    assert allocate(deepspeed.PipelineEngine, ours, enabled=False) is DynamicPipelineEngine
    assert not vars(DynamicPipelineEngine).keys() & set(dir(deepspeed.PipelineEngine)) - {"__doc__", "__module__"}


@pytest.mark.parametrize("base", [deepspeed.PipelineEngine, DynamicPipelineEngine])
def test_an_engine_class_of_ones_own_becomes_dynamic(base: type) -> None:
    """Its methods go before ours, and ours before DeepSpeed's."""

    class Mine(base):  # type: ignore[misc, valid-type]
        def eval_batch(self, *args: Any, **kwargs: Any) -> Any:
            return super().eval_batch(*args, **kwargs)

    ours = DynamicPipelineModule.__new__(DynamicPipelineModule)
    assert allocate(Mine, ours, enabled=False) is Mine
    made = allocate(Mine, ours)
    assert made.__name__ == "Mine" and issubclass(made, Mine) and issubclass(made, EnabledEngine)
    assert made is allocate(Mine, ours)
    order = made.__mro__
    assert order.index(Mine) < order.index(Hooks) < order.index(deepspeed.PipelineEngine)
    assert made.eval_batch is Mine.eval_batch and made.save_checkpoint is EnabledEngine.save_checkpoint


def test_an_own_method_that_hides_ours_is_refused() -> None:
    class Adds(deepspeed.PipelineEngine):  # type: ignore[misc]
        def _exec_schedule(self, pipe_schedule: Any) -> None:
            super()._exec_schedule(pipe_schedule)

    class Hides(Adds):
        def _take_model_step(self, lr_kwargs: Any) -> None:
            deepspeed.PipelineEngine._take_model_step(self, lr_kwargs)

    ours = DynamicPipelineModule.__new__(DynamicPipelineModule)
    check_hooks(allocate(Adds, ours))
    with pytest.raises(ValueError, match=r"Hides\._take_model_step hides .*; call super\(\)\._take_model_step"):
        check_hooks(allocate(Hides, ours))


def test_an_own_broadcast_is_refused_where_replicas_own_parameters() -> None:
    class Broadcasts(deepspeed.PipelineEngine):  # type: ignore[misc]
        def _broadcast_model(self) -> None:
            """Gives all replicas the first one's parameters in a way of its own."""

    made = allocate(Broadcasts, DynamicPipelineModule.__new__(DynamicPipelineModule))
    check_hooks(made)
    with pytest.raises(ValueError, match=r"_broadcast_model hides .* without which replicas would lose what they own"):
        check_hooks(made, owns=True)
