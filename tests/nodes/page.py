"""What docs/nodes.md shows, for the tests that run it as it stands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from dynpipe_ds.ports import reserved_port

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "nodes.md"
BATCHES = 20


def blocks(language: str) -> list[str]:
    """The page's blocks of a language; ``""`` for those without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    return [block for its_language, block in found if its_language == language]


def write_job(folder: Path) -> Path:
    """Write the page's program and configuration into a new folder."""
    folder.mkdir(parents=True)
    (program,), (configuration,) = blocks("python"), blocks("json")
    (folder / "train.py").write_text(program, encoding="utf-8")
    (folder / "ds_config.json").write_text(configuration, encoding="utf-8")
    return folder


def environment(**more: str) -> dict[str, str]:
    """The variables of an activated environment, one thread a rank."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {
        **os.environ, "PATH": path, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
        "DEEPSPEED_LOG_LEVEL": "error", **more,
    }  # fmt: skip


def not_passed_on() -> str:
    """Lines of ``.deepspeed_env`` for what the tests themselves need on every node."""
    names = [name for name in ("TORCH_EXTENSIONS_DIR", "DS_ACCELERATOR") if name in os.environ]
    return "".join(["DEEPSPEED_LOG_LEVEL=error\n", *(f"{name}={os.environ[name]}\n" for name in names)])


def run(command: list[str], folder: Path, env: dict[str, str]) -> str:
    """Run a command and return its output."""
    started = subprocess.Popen(
        command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = started.communicate(timeout=120)[0]
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGTERM)  # the launcher would leave its ranks behind
        raise
    assert started.returncode == 0, f"{command}: {output[-3000:]}"
    return output


def losses(output: str) -> list[str]:
    """Losses of all batches, with all digits of a float32."""
    found = re.findall(r"batch (\d+): loss (\S+)", output)
    assert [int(batch) for batch, _ in found] == list(range(BATCHES)), output[-3000:]
    return [loss for _, loss in found]


def local_losses(folder: Path) -> list[str]:
    """Losses of the same job on this machine, started without any node."""
    with reserved_port() as port:
        command = ["deepspeed", "--no_local_rank", "--num_accelerators", "2", "--master_port", str(port), "train.py"]
        found = losses(run(command, write_job(folder), environment()))
    assert len(set(found)) == BATCHES
    return found
