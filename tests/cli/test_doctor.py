"""``dynpipe doctor``: each check finds what it is for."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils import cpp_extension

from dynpipe_ds.cli import checks, running
from tests.cli.conftest import Command, Done


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An extensions folder of the test's own, which does not exist yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path / "ops"


def of(done: Done, name: str) -> list[dict[str, Any]]:
    """The checks of a name."""
    return [check for check in done.json["checks"] if check["name"] == name]


def test_a_good_machine_and_its_text(dynpipe: Command, folder: Path) -> None:
    """Everything is looked at; text and JSON agree on what is wrong."""
    done = dynpipe("doctor", "--json")
    assert {check["name"] for check in done.json["checks"]} >= {
        "python", "torch", "deepspeed", "launcher", "compiler", "headers", "ninja", "accelerator", "back-end",
        "host name", "port", "extensions",
    }  # fmt: skip
    for name in ("python", "torch", "deepspeed", "back-end", "extensions"):
        assert [check["status"] for check in of(done, name)] == ["ok"]
    problems = sum(check["status"] == "problem" for check in done.json["checks"])
    assert done.code == bool(problems) and done.json["ok"] is not bool(problems)
    assert dynpipe("doctor").out.count("PROBLEM") == problems
    assert folder.is_dir() and not list(folder.iterdir()), "the trial file is gone"


@pytest.mark.parametrize("cache", [None, "elsewhere"])
def test_the_folder_of_extensions_is_that_of_torch(monkeypatch: pytest.MonkeyPatch, cache: str | None) -> None:
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if cache:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    assert running.extensions_folder(os.environ).resolve() == Path(cpp_extension.get_default_build_root())
    assert running.extensions_folder({"TORCH_EXTENSIONS_DIR": "mine"}) == Path("mine")


def test_a_stale_lock_and_a_fresh_one(dynpipe: Command, folder: Path) -> None:
    """Old: a problem with the command that removes it. Fresh: something may be compiling."""
    lock = folder / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    (fresh,) = of(dynpipe("doctor", "--json"), "compile lock")
    assert fresh["status"] == "warning"
    os.utime(lock, (time.time() - checks.STALE_LOCK_S - 60,) * 2)
    done = dynpipe("doctor", "--json")
    (stale,) = of(done, "compile lock")
    assert stale["status"] == "problem" and f"rm {lock}" in stale["remedy"] and "11 minutes" in stale["found"]
    assert done.code == 1
    text = dynpipe("doctor").out
    assert f"PROBLEM  compile lock  {lock}" in text and "1 problem" in text


def test_a_folder_that_cant_be_written(dynpipe: Command, folder: Path) -> None:
    """Here because a file is in its way (a superuser may write anywhere else)."""
    folder.write_text("", encoding="utf-8")
    done = dynpipe("doctor", "--json")
    (found,) = of(done, "extensions")
    assert done.code == 1 and found["status"] == "problem" and "TORCH_EXTENSIONS_DIR" in found["remedy"]


def test_a_port_in_use(dynpipe: Command) -> None:
    """Found for --port and for MASTER_PORT."""
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (found,) = of(dynpipe("doctor", "--port", port, "--json"), "port")
    assert found["status"] == "problem" and str(port) in found["found"] and "--master_port" in found["remedy"]


def test_master_port_is_the_default(dynpipe: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """And must be a port."""
    monkeypatch.setenv("MASTER_PORT", "http")
    done = dynpipe("doctor")
    assert done.code == 2 and "MASTER_PORT http: must be a whole number" in done.err


def test_nothing_on_the_path(dynpipe: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launcher, compiler and ninja are missed, each with what helps."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    done = dynpipe("doctor", "--json")
    for name in ("launcher", "compiler", "ninja"):
        (found,) = of(done, name)
        assert found["status"] == "problem" and found["remedy"]


def test_threads_that_fight(dynpipe: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning, on a CPU."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    done = dynpipe("doctor", "--json")
    if of(done, "accelerator")[0]["found"].startswith("cpu"):
        assert of(done, "threads")[0]["status"] == "warning"


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        ({"dynamic_pipeline": {"min_gain": 5, "rebalance_evry": 10, "first_batch": 9, "last_batch": 3}}, 3),
        ({"dynamic_pipeline": {"enabled": True, "pinned_cuts": [9], "stage_speeds": [1.0]}}, 2),  # with --layers 8
        ({"dynamic_pipeline": {"enabled": True, "pinned_cuts": [9], "min_gain": 5, "repack": {"eager": 1}}}, 3),
        ({"dynamic_pipelin": {}}, 1),
        ({"dynamic_pipeline": []}, 1),
    ],
)
def test_a_wrong_configuration(dynpipe: Command, config: dict[str, Any], problems: int) -> None:
    """All problems at once, each a check of its own with its remedy."""
    Path("ds.json").write_text(json.dumps(config), encoding="utf-8")
    done = dynpipe("doctor", "--config", "ds.json", "--layers", 8, "--stages", 2, "--json")
    found = of(done, "config")
    assert done.code == 1 and len(found) == problems
    assert all(check["status"] == "problem" for check in found)
    assert len({check["found"] for check in found}) == problems


@pytest.mark.parametrize(
    ("config", "status"),
    [({}, "warning"), ({"dynamic_pipeline": {}}, "warning"), ({"dynamic_pipeline": {"enabled": True}}, "ok")],
)
def test_a_configuration_that_does_nothing(dynpipe: Command, config: dict[str, Any], status: str) -> None:
    """It may be meant."""
    Path("ds.json").write_text(json.dumps(config), encoding="utf-8")
    (found,) = of(dynpipe("doctor", "--config", "ds.json", "--json"), "config")
    assert found["status"] == status
