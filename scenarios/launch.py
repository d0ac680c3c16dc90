"""Start the ranks of an entry on this machine, or on a hostfile's, with DeepSpeed's launcher."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator

from dynpipe_ds.ranks import reserved_port
from scenarios.opening import TOLD
from scenarios.ranks import ASKED, ENDED, LISTENS

_LOOK_S = 0.2  # between two looks whether more ranks listen


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


def launch_command(module: str, arguments: Sequence[str], settings: LaunchSettings, port: int) -> list[str]:
    """Return the command that runs a module on all ranks.

    Args:
        module: run as ``python -m``.
        arguments: its arguments.
        settings: where.
        port: where ranks of this machine alone meet.
    """
    places = ["--hostfile", settings.hostfile] if settings.hostfile else ["--master_port", str(port)]
    return [
        sys.executable, "-m", "deepspeed.launcher.runner", "--no_local_rank", "--quiet",
        "--num_accelerators", str(settings.num_accelerators), *places, "--module", module, *arguments,
    ]  # fmt: skip


def launch(module: str, arguments: Sequence[str], settings: LaunchSettings, *, told: str = "") -> int:
    """Run a module on all ranks and wait.

    SIGTERM, SIGHUP and Ctrl-C ask the ranks to end, which save their state first; a second Ctrl-C ends them at once.

    Args:
        module: run as ``python -m``.
        arguments: its arguments.
        settings: where.
        told: what is trained, printed first; the ranks then need not say it.

    Returns:
        The launcher's exit code; 128 and the signal's number if the ranks ended because they were asked to.
    """
    with tempfile.TemporaryDirectory(prefix="scenarios-") as folder, _Asking(Path(folder)) as asking:
        if told:
            print(told, flush=True)
        # The launcher looks for ninja on the PATH, and warns of a device that it had to find.
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        environment = {"DS_ACCELERATOR": get_accelerator().device_name(), **os.environ, "PATH": path, ASKED: folder}
        if told:
            environment[TOLD] = "1"
        with reserved_port() as port:
            return asking.run(launch_command(module, arguments, settings, port), environment)


class _Asking:
    """Passes on to the ranks that a signal asks for an end, whenever it comes.

    Args:
        folder: by which this process and the ranks know of each other (see :func:`scenarios.ranks.end_quietly`).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: list[int] = []
        self._passed_on: set[str] = set()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Asking:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, _frame: object) -> None:
        if number == signal.SIGINT and self._asked and self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            return
        if number == signal.SIGINT:
            print("\nending after this turn, with the state saved; Ctrl-C again ends at once", file=sys.stderr)
        self._asked.append(number)
        (self._folder / ASKED).touch()  # for ranks that do not listen yet
        self._pass_on()

    def _pass_on(self) -> None:
        """Tell the ranks that listen by now."""
        for file in self._folder.glob(f"{LISTENS}*"):
            if file.name not in self._passed_on:
                self._passed_on.add(file.name)
                with contextlib.suppress(ProcessLookupError):  # ended meanwhile
                    os.kill(int(file.name.removeprefix(LISTENS)), signal.SIGTERM)

    def run(self, command: list[str], environment: dict[str, str]) -> int:
        """Run the launcher, unless an end is asked for already; returns the exit code."""
        if self._asked:
            return 128 + self._asked[0]
        # In a session of its own, or Ctrl-C would reach all processes and end them before they have saved anything.
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(_LOOK_S)
                break
            if self._asked:
                self._pass_on()
        return 128 + self._asked[0] if self._asked and (self._folder / ENDED).exists() else code

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
