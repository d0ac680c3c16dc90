"""The checks of ``dynpipe doctor``: each looks at one thing and says what it found and what helps."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from dynpipe_ds._versions import DEEPSPEED_RANGE, LEAST_PYTHON, LEAST_TORCH, TESTED_SERIES, is_older
from dynpipe_ds.cli.command import listed_problems
from dynpipe_ds.cli.running import extensions_folder
from dynpipe_ds.config import SECTION, DynamicPipelineConfig, check_against_model, parse_config
from dynpipe_ds.host import accelerator
from dynpipe_ds.host.install import why_unsupported

Status = Literal["ok", "warning", "problem"]

STALE_LOCK_S = 600.0
"""Age from which a compile lock counts as left behind: DeepSpeed's operations compile in well under this time."""

_KEY = re.compile(r"(\w+)[\w.]* (?:=|is missing)")  # as the configuration's problems begin


@dataclass(frozen=True)
class Check:
    """What one check found.

    Attributes:
        name: of what was looked at.
        status: ``"ok"``, ``"warning"`` (may be meant) or ``"problem"``.
        found: the value.
        remedy: what helps; empty when it is ok.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""


def found(name: str, value: str, remedy: str = "", status: Status = "problem") -> Check:
    """What was found, which is ok where nothing has to be done."""
    return Check(name, status if remedy else "ok", value, remedy)


def check_machine(port: int) -> Iterator[Check]:
    """All that has to be right before a job is started whose first rank listens on a port."""
    yield from check_versions()
    yield _check_launcher()
    yield from _check_compiler()
    yield from _check_accelerator()
    yield from _check_network(port)
    yield from _check_extensions()


def check_versions() -> Iterator[Check]:
    """Python and the libraries against the least versions, DeepSpeed against the series that was tested."""
    python, torch_version = platform.python_version(), str(torch.__version__)
    newer = f"install Python {LEAST_PYTHON} or newer" if is_older(python, LEAST_PYTHON) else ""
    yield found("python", f"{python} ({sys.executable})", newer)
    newer = f"pip install 'torch>={LEAST_TORCH}'" if is_older(torch_version, LEAST_TORCH) else ""
    yield found("torch", torch_version, newer)
    yield _check_deepspeed(importlib.metadata.version("deepspeed"))
    others = []
    for name in ("dynpipe_ds", "numpy", "pydantic", "numba"):  # the last one is optional
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            others.append(f"{name} {importlib.metadata.version(name)}")
    yield found("others", ", ".join(others))


def _check_deepspeed(version: str) -> Check:
    rule, install = why_unsupported(), f"pip install '{DEEPSPEED_RANGE}'"
    if rule:
        return found("deepspeed", f"{version} {rule}", install)
    tested = version.startswith(f"{TESTED_SERIES}.")
    remedy = "" if tested else f"run 'dynpipe doctor --numerics', or {install}, the series that was tested"
    return found("deepspeed", version, remedy, "warning")


def _beside_python(name: str) -> Path:
    return Path(sys.executable).with_name(name)


def _on_path(name: str) -> str:
    """What puts a program of this Python's on the PATH."""
    beside = _beside_python(name)
    return f"export PATH={beside.parent}:$PATH" if beside.exists() else f"pip install {name}"


def _check_launcher() -> Check:
    path, beside = shutil.which("deepspeed"), _beside_python("deepspeed")
    if path is None:
        return found("launcher", "no 'deepspeed' on the PATH", _on_path("deepspeed"))
    if beside.exists() and not beside.samefile(path):
        remedy = f"{_on_path('deepspeed')}, or start {beside}"
        return found("launcher", f"{path} is of another Python", remedy, "warning")
    return found("launcher", path)


def _check_compiler() -> Iterator[Check]:
    """What DeepSpeed compiles its operations with."""
    name = os.environ.get("CXX", "g++")
    yield _check_program("compiler", name, f"{name} can't be run", "apt-get install g++, or set CXX to your compiler")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    missing = "" if header.is_file() else "apt-get install python3-dev, or your Python's headers"
    yield found("headers", f"{header} is missing" if missing else str(header), missing)
    yield _check_program("ninja", "ninja", "not on the PATH", _on_path("ninja"))


def _check_program(check: str, program: str, wrong: str, remedy: str) -> Check:
    """Whether a program says its version."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return found(check, wrong, remedy)
    return found(check, (done.stdout.splitlines() or [""])[0])


def _check_accelerator() -> Iterator[Check]:
    """The device that DeepSpeed chose, its communication back-end, and threads on a CPU."""
    name, count = accelerator.kind(), accelerator.num_devices()
    if name == "cpu":
        yield found("accelerator", f"cpu, {os.cpu_count()} cores")
        if "OMP_NUM_THREADS" in os.environ:
            yield found("threads", f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}")
        else:
            remedy = "export OMP_NUM_THREADS=<cores / ranks on this machine>"
            yield found("threads", "OMP_NUM_THREADS is not set: ranks fight for the cores", remedy, "warning")
    elif not count:
        yield found("accelerator", f"{name}, but no device", "make a device visible to this process")
    else:
        gib = accelerator.memory_bytes() / 2**30
        yield found("accelerator", f"{count} x {name} ({accelerator.device()}), {gib:.0f} GiB each")
    backend = accelerator.backend()
    torch_name = "gloo" if backend == "ccl" else backend  # DeepSpeed falls back to gloo on a CPU without oneCCL
    available = dist.is_available() and dist.is_backend_available(torch_name)
    yield found("back-end", torch_name, "" if available else "install a build of torch with it")


def _check_network(port: int) -> Iterator[Check]:
    """Whether this machine finds itself, and whether the launcher's port is free."""
    host = socket.gethostname()
    try:
        yield found("host name", f"{host} is {socket.gethostbyname(host)}")
    except OSError as error:
        remedy = f"add '127.0.0.1 {host}' to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        yield found("host name", f"{host} has no address ({error})", remedy)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            remedy = "start with --master_port=<another one>, or end the job that holds it"
            yield found("port", f"{port} can't be used ({error.strerror})", remedy)
        else:
            yield found("port", f"{port} is free")


def _check_extensions() -> Iterator[Check]:
    """The folder of compiled operations: write access, and locks that a killed compilation left behind."""
    folder = extensions_folder(os.environ)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "set TORCH_EXTENSIONS_DIR to a folder that can be written to"
        yield found("extensions", f"{folder}: {error.strerror or error}", remedy)
        return
    yield found("extensions", f"{folder} can be written to")
    for lock in sorted(folder.rglob("lock")):
        try:
            age_s = time.time() - lock.stat().st_mtime
        except FileNotFoundError:  # that compilation has just ended
            continue
        age = f"{lock}, {age_s / 60:.0f} minutes old: every start waits for it"
        status: Status = "problem" if age_s >= STALE_LOCK_S else "warning"
        yield found("compile lock", age, f"if nothing compiles, delete it: rm {lock}", status)


def check_config(
    config: dict[str, Any], *, num_layers: int | None = None, num_stages: int | None = None
) -> Iterator[Check]:
    """The ``"dynamic_pipeline"`` section of a DeepSpeed configuration, every problem as one check.

    With L and S also what depends on the model.
    """
    lines: list[str] = []
    section: DynamicPipelineConfig | None
    try:
        section = parse_config(config)
    except ValueError as error:
        lines = listed_problems(error)
        section = _without_wrong_keys(config, lines)
    if section is not None and num_layers is not None and num_stages is not None:
        try:
            check_against_model(section, num_layers=num_layers, num_stages=num_stages)
        except ValueError as error:
            lines += listed_problems(error)
    for line in lines:
        value, _, remedy = line.partition(": ")
        yield Check("config", "problem", value, remedy)
    if section is not None and not lines:
        yield _switched_on(config, section)


def _without_wrong_keys(config: dict[str, Any], lines: list[str]) -> DynamicPipelineConfig | None:
    """The section without the keys that problems name, to see what else is wrong; ``None`` if that is no section."""
    section = config.get(SECTION)
    if not isinstance(section, dict):
        return None
    named = {key for line in lines for key in _KEY.findall(line.partition(": ")[0])}
    try:
        return parse_config({SECTION: {key: value for key, value in section.items() if key not in named}})
    except ValueError:
        return None


def _switched_on(config: dict[str, Any], section: DynamicPipelineConfig) -> Check:
    if not section.enabled:
        why = f'"{SECTION}" is not enabled' if SECTION in config else f'no "{SECTION}" section'
        remedy = f'add "{SECTION}": {{"enabled": true}}, unless stages shall stay as they are'
        return Check("config", "warning", f"{why}: stages never move", remedy)
    given = ", ".join(f"{key} = {value}" for key, value in config[SECTION].items() if key != "enabled")
    return Check("config", "ok", f'"{SECTION}" is enabled; {given or "every other key has its default"}')
