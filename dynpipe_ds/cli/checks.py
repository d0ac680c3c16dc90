"""The checks of ``dynpipe doctor``: each looks at one thing and says what it found and what helps."""

from __future__ import annotations

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
from torch.utils import cpp_extension

from dynpipe_ds._versions import DEEPSPEED_RANGE, LEAST_PYTHON, LEAST_TORCH, TESTED_SERIES, is_older
from dynpipe_ds.cli.command import listed_problems
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


def check_versions() -> Iterator[Check]:
    """Python and the libraries against the least versions, DeepSpeed against the series that was tested."""
    python = platform.python_version()
    if is_older(python, LEAST_PYTHON):
        yield Check("python", "problem", python, f"install Python {LEAST_PYTHON} or newer")
    else:
        yield Check("python", "ok", f"{python} ({sys.executable})")
    version = str(torch.__version__)
    remedy = f"pip install 'torch>={LEAST_TORCH}'" if is_older(version, LEAST_TORCH) else ""
    yield Check("torch", "problem" if remedy else "ok", version, remedy)
    yield _check_deepspeed(importlib.metadata.version("deepspeed"))
    others = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("dynpipe_ds", "numpy", "pydantic")
                       if _is_installed(name))  # fmt: skip
    yield Check("others", "ok", others)


def _check_deepspeed(version: str) -> Check:
    rule = why_unsupported()
    if rule:
        return Check("deepspeed", "problem", f"{version} {rule}", f"pip install '{DEEPSPEED_RANGE}'")
    if not version.startswith(f"{TESTED_SERIES}."):
        remedy = f"run 'dynpipe doctor --numerics', or pip install '{DEEPSPEED_RANGE}', the series that was tested"
        return Check("deepspeed", "warning", version, remedy)
    return Check("deepspeed", "ok", version)


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def check_launcher() -> Iterator[Check]:
    """Whether ``deepspeed`` is on the PATH, and the one of this Python."""
    found, beside = shutil.which("deepspeed"), Path(sys.executable).with_name("deepspeed")
    if found is None:
        remedy = f"export PATH={beside.parent}:$PATH" if beside.exists() else "pip install deepspeed"
        yield Check("launcher", "problem", "no 'deepspeed' on the PATH", remedy)
    elif beside.exists() and not beside.samefile(found):
        remedy = f"export PATH={beside.parent}:$PATH, or start {beside}"
        yield Check("launcher", "warning", f"{found} is of another Python", remedy)
    else:
        yield Check("launcher", "ok", found)


def check_compiler() -> Iterator[Check]:
    """What DeepSpeed compiles its operations with: compiler, Python's headers, ninja."""
    name = os.environ.get("CXX", "g++")
    version = _first_line([name, "--version"])
    if version is None:
        yield Check("compiler", "problem", f"{name} can't be run", "apt-get install g++, or set CXX to your compiler")
    else:
        yield Check("compiler", "ok", version)
    header = Path(sysconfig.get_path("include")) / "Python.h"
    remedy = "" if header.is_file() else "apt-get install python3-dev, or your Python's headers"
    yield Check("headers", "problem" if remedy else "ok", f"{header}{' is missing' if remedy else ''}", remedy)
    ninja, beside = _first_line(["ninja", "--version"]), Path(sys.executable).with_name("ninja")
    if ninja is not None:
        yield Check("ninja", "ok", ninja)
    else:
        remedy = f"export PATH={beside.parent}:$PATH" if beside.exists() else "pip install ninja"
        yield Check("ninja", "problem", "not on the PATH", remedy)


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.splitlines() or [""])[0] if done.returncode == 0 else None


def check_accelerator() -> Iterator[Check]:
    """The device that DeepSpeed chose, its communication back-end, and threads on a CPU."""
    name, count = accelerator.kind(), accelerator.num_devices()
    if name == "cpu":
        yield Check("accelerator", "ok", f"cpu, {os.cpu_count()} cores")
        threads = os.environ.get("OMP_NUM_THREADS")
        if threads is None:
            remedy = "export OMP_NUM_THREADS=<cores / ranks on this machine>"
            yield Check("threads", "warning", "OMP_NUM_THREADS is not set: ranks fight for the cores", remedy)
        else:
            yield Check("threads", "ok", f"OMP_NUM_THREADS={threads}")
    elif not count:
        yield Check("accelerator", "problem", f"{name}, but no device", "make a device visible to this process")
    else:
        gib = accelerator.memory_bytes() / 2**30
        yield Check("accelerator", "ok", f"{count} x {name} ({accelerator.device()}), {gib:.0f} GiB each")
    backend = accelerator.backend()
    torch_name = "gloo" if backend == "ccl" else backend  # DeepSpeed falls back to gloo on a CPU without oneCCL
    available = dist.is_available() and dist.is_backend_available(torch_name)
    remedy = "" if available else "install a build of torch with it"
    yield Check("back-end", "ok" if available else "problem", torch_name, remedy)


def check_network(port: int) -> Iterator[Check]:
    """Whether this machine finds itself, and whether the launcher's port is free.

    Args:
        port: that the first rank will listen on.
    """
    host = socket.gethostname()
    try:
        yield Check("host name", "ok", f"{host} is {socket.gethostbyname(host)}")
    except OSError as error:
        remedy = f"add '127.0.0.1 {host}' to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        yield Check("host name", "problem", f"{host} has no address ({error})", remedy)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            remedy = "start with --master_port=<another one>, or end the job that holds it"
            yield Check("port", "problem", f"{port} can't be used ({error.strerror})", remedy)
        else:
            yield Check("port", "ok", f"{port} is free")


def check_extensions(now_s: float | None = None) -> Iterator[Check]:
    """The folder of compiled operations: write access, and locks that a killed compilation left behind.

    Args:
        now_s: the present time; ``None``: the clock's.
    """
    folder = extensions_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        remedy = "set TORCH_EXTENSIONS_DIR to a folder that can be written to"
        yield Check("extensions", "problem", f"{folder}: {error.strerror or error}", remedy)
        return
    yield Check("extensions", "ok", f"{folder} can be written to")
    for lock in sorted(folder.rglob("lock")):
        try:
            age_s = (time.time() if now_s is None else now_s) - lock.stat().st_mtime
        except FileNotFoundError:  # that compilation has just ended
            continue
        stale = age_s >= STALE_LOCK_S
        found = f"{lock}, {age_s / 60:.0f} minutes old: every start waits for it"
        remedy = f"if nothing compiles, delete it: rm {lock}"
        yield Check("compile lock", "problem" if stale else "warning", found, remedy)


def extensions_folder() -> Path:
    """The folder that torch compiles extensions into."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    return Path(given if given else cpp_extension.get_default_build_root())


def check_config(
    config: dict[str, Any], *, num_layers: int | None = None, num_stages: int | None = None
) -> Iterator[Check]:
    """The ``"dynamic_pipeline"`` section, every problem as one check.

    Args:
        config: a whole DeepSpeed configuration.
        num_layers: L, with ``num_stages`` to check what depends on the model.
        num_stages: S.
    """
    lines: list[str] = []
    section: DynamicPipelineConfig | None = None
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
        found, _, remedy = line.partition(": ")
        yield Check("config", "problem", found, remedy)
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
    remedy = f'add "{SECTION}": {{"enabled": true}}, unless stages shall stay as they are'
    if SECTION not in config:
        return Check("config", "warning", f'no "{SECTION}" section: stages never move', remedy)
    if not section.enabled:
        return Check("config", "warning", f'"{SECTION}" is not enabled: stages never move', remedy)
    given = ", ".join(f"{key} = {value}" for key, value in config[SECTION].items() if key != "enabled")
    return Check("config", "ok", f'"{SECTION}" is enabled; {given or "every other key has its default"}')
