"""Start the ranks of an entry on this machine, or on a hostfile's, with DeepSpeed's launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from deepspeed.accelerator import get_accelerator

from scenarios.opening import TOLD
from scenarios.ranks import ENDED


@dataclass(frozen=True, kw_only=True)
class LaunchSettings:
    """Where ranks are started.

    Attributes:
        num_accelerators: ranks on each machine.
        hostfile: file with ``worker-1 slots=4`` a line; ``None`` for this machine alone.
    """

    num_accelerators: int = 2
    hostfile: str | None = None

    def __post_init__(self) -> None:
        """Refuse what can't be started, all problems at once."""
        problems = []
        if self.num_accelerators < 1:
            problems.append(f"launch.num_accelerators={self.num_accelerators} must be at least 1")
        if self.hostfile is not None and not Path(self.hostfile).is_file():
            problems.append(f"launch.hostfile={self.hostfile} does not exist: give a file, or null for this machine")
        if problems:
            raise ValueError("; ".join(problems))


    @property
    def num_ranks(self) -> int:
        """Ranks over all machines."""
        if self.hostfile is None:
            return self.num_accelerators
        lines = Path(self.hostfile).read_text(encoding="utf-8").splitlines()
        return self.num_accelerators * sum(bool(line.partition("#")[0].strip()) for line in lines)


def launch_command(module: str, arguments: Sequence[str], settings: LaunchSettings) -> list[str]:
    """Return the command that runs a module on all ranks.

    Args:
        module: run as ``python -m``.
        arguments: its arguments.
        settings: where.
    """
    places = ["--hostfile", settings.hostfile] if settings.hostfile else ["--master_port", str(free_port())]
    return [
        sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--quiet",
        "--num_accelerators", str(settings.num_accelerators), *places, "--module", module, *arguments,
    ]  # fmt: skip


def launch(module: str, arguments: Sequence[str], settings: LaunchSettings, *, told: bool = False) -> int:
    """Run a module on all ranks and wait.

    SIGTERM, SIGHUP and Ctrl-C ask the ranks to end, which save their state first; a second Ctrl-C ends them at once.

    Args:
        module: run as ``python -m``.
        arguments: its arguments.
        settings: where.
        told: whether the ranks need not say what they train.

    Returns:
        The launcher's exit code; 128 and the signal's number if the ranks ended because they were asked to.
    """
    # The launcher looks for ninja on the PATH, and warns of a device that it had to find.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {"DS_ACCELERATOR": get_accelerator().device_name(), **os.environ, "PATH": path}
    if told:
        environment[TOLD] = "1"
    with tempfile.TemporaryDirectory(prefix="scenarios-") as folder:
        environment[ENDED] = f"{folder}/ended"
        code, asked = _run(launch_command(module, arguments, settings), environment, module)
        ended = (Path(folder) / "ended").exists()
    return 128 + asked[0] if ended and asked else code


def _run(command: list[str], environment: dict[str, str], module: str) -> tuple[int, list[int]]:
    """Run the launcher; returns its exit code, and the signals that asked for an end."""
    # In a session of its own, or Ctrl-C would reach all processes and end them before they have saved anything.
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    asked: list[int] = []

    def ask(number: int, _frame: object) -> None:
        if number == signal.SIGINT and asked:
            os.killpg(process.pid, signal.SIGKILL)
            return
        if number == signal.SIGINT:
            print("\nending after this turn, with the state saved; Ctrl-C again ends at once", file=sys.stderr)
        asked.append(number)
        with contextlib.suppress(psutil.Error):  # ended meanwhile
            for child in psutil.Process(process.pid).children(recursive=True):
                if child.cmdline()[2:4] == ["-m", module]:
                    child.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        return process.wait(), asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """A port that no other job on this machine uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
