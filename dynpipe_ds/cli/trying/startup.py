"""Copied to a run's folder as ``sitecustomize.py``: waits for DeepSpeed, in every Python process of the user's command.

It imports nothing but the standard library, does nothing in a process that never imports DeepSpeed and in DeepSpeed's
own launcher, and runs the ``sitecustomize`` that the user has.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
_AWAITED = ("deepspeed", "dynpipe_ds")
_LAUNCHERS = ("deepspeed", "deepspeed.pt", "ds", "dsr")


class _Waiting:
    """A finder that lets others find the two packages, and is told when they have been imported."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """As importlib asks."""
        if self._asking or name not in _AWAITED:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            run = loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                self._imported(name)

            loader.exec_module = exec_module
        return spec

    def _imported(self, name: str) -> None:
        if name == "dynpipe_ds":  # which has imported DeepSpeed
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            importlib.import_module("dynpipe_ds.cli.trying.install").install(HERE)
        elif "dynpipe_ds" not in sys.modules:  # else that is what imports it, and is waited for
            if importlib.util.find_spec("dynpipe_ds") is None:  # a checkout, or another Python than the command's
                with open(os.path.join(HERE, "package.txt"), encoding="utf-8") as file:
                    sys.path.append(file.read())
            importlib.import_module("dynpipe_ds")


def _is_launcher() -> bool:
    arguments = [a for a in sys.orig_argv[1:] if a == "-m" or not a.startswith("-")][:2]
    if arguments[:1] == ["-m"]:
        return arguments[-1].startswith("deepspeed.launcher")
    return bool(arguments) and os.path.basename(arguments[0]) in _LAUNCHERS


def _run_the_users_own() -> None:
    """The ``sitecustomize`` that this file hides."""
    places = [place for place in sys.path if os.path.abspath(place or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", places)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if not _is_launcher():
        sys.meta_path.insert(0, _Waiting())
    _run_the_users_own()
