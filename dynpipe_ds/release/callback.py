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
        options = CallbackOptions(**given)
        self._command = options.command
        self._function = options.function
        self._timeout_s = options.timeout_s
        self._constraints = Constraints(whole_nodes=options.whole_nodes, lowest_stay=options.lowest_stay)

    def check(self) -> None:
        """Look for the command, or import the function."""
        if self._command is not None:
            if shutil.which(self._command[0]) is None:
                raise ReleaseError(
                    f"repack.release.command = {self._command}: {self._command[0]!r} is no executable command "
                    f"on this node; give its path, or make it executable"
                )
        else:
            self._imported()

    def constraints(self) -> Constraints:
        """As the options say."""
        return self._constraints

    def release(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        """Call it."""
        if self._command is not None:
            self._run(_filled(self._command, ranks, nodes))
            return
        function = self._imported()
        try:
            function(tuple(ranks), tuple(nodes))
        except Exception as error:
            raise ReleaseError(f"{self._function} raised {type(error).__name__}: {error}") from error

    def _run(self, command: list[str]) -> None:
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=self._timeout_s, stdin=subprocess.DEVNULL, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ReleaseError(f"command {command}: {error}") from error
        if done.returncode:
            text = " ".join((done.stderr or done.stdout).split())[-500:]
            raise ReleaseError(f"command {command} ended with exit code {done.returncode}: {text or 'no output'}")

    def _imported(self) -> Callable[..., Any]:
        try:
            function: Callable[..., Any] = find(self._function or "")
        except (ImportError, AttributeError, ValueError) as error:
            raise ReleaseError(
                f"repack.release.function = {self._function!r}: {error}; must be a function that every rank can "
                f'import, "package.module:function"'
            ) from error
        if not callable(function):
            raise ReleaseError(f"repack.release.function = {self._function!r}: is {function!r}, not a function")
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
