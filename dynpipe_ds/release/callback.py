"""``callback``: any command or Python function gives the workers back."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from dynpipe_ds.release.base import Constraints, ReleaseBackend, ReleaseError
from dynpipe_ds.release.options import CallbackOptions
from dynpipe_ds.release.registry import find


class CallbackBackend(ReleaseBackend):
    """Calls a command or a function once the freed workers have left.

    Args:
        **given: those of :class:`~dynpipe_ds.release.options.CallbackOptions`. Ranks and nodes are filled into a
            command comma separated; a function gets them as two tuples.
    """

    def __init__(self, **given: Any) -> None:
        self._options = CallbackOptions(**given)

    def check(self) -> None:
        """Look for the command, or import the function."""
        command = self._options.command
        if command is None:
            self._imported()
        elif shutil.which(command[0]) is None:
            raise ReleaseError(
                f"repack.release.command = {command}: {command[0]!r} is no executable command on this node; give its "
                f"path, or make it executable"
            )

    def constraints(self) -> Constraints:
        """As the options say."""
        return Constraints(whole_nodes=self._options.whole_nodes, lowest_stay=self._options.lowest_stay)

    def release(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        """Call it."""
        if self._options.command is not None:
            self._run(_filled(self._options.command, ranks, nodes))
            return
        function = self._imported()
        try:
            function(tuple(ranks), tuple(nodes))
        except Exception as error:
            raise ReleaseError(f"{self._options.function} raised {type(error).__name__}: {error}") from error

    def _run(self, command: list[str]) -> None:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self._options.timeout_s, stdin=subprocess.DEVNULL,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ReleaseError(f"command {command}: {error}") from error
        if done.returncode:
            text = " ".join((done.stderr or done.stdout).split())[-500:]
            raise ReleaseError(f"command {command} ended with exit code {done.returncode}: {text or 'no output'}")

    def _imported(self) -> Callable[..., Any]:
        name = self._options.function
        try:
            function: Callable[..., Any] = find(name or "")
        except (ImportError, AttributeError, ValueError) as error:
            raise ReleaseError(
                f"repack.release.function = {name!r}: {error}; must be a function that every rank can import, "
                f'"package.module:function"'
            ) from error
        if not callable(function):
            raise ReleaseError(f"repack.release.function = {name!r}: is {function!r}, not a function")
        return function


def _filled(command: Sequence[str], ranks: Sequence[int], nodes: Sequence[str]) -> list[str]:
    # Not str.format: an argument may hold braces of its own, such as JSON.
    values = {"{ranks}": ",".join(map(str, ranks)), "{nodes}": ",".join(nodes), "{num_ranks}": str(len(ranks))}
    filled = []
    for argument in command:
        for placeholder, value in values.items():
            argument = argument.replace(placeholder, value)
        filled.append(argument)
    return filled
