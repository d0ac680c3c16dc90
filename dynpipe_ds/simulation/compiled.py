"""The inner loops of simulation and planning as machine code, where Numba is installed and it pays.

Until :func:`compile_loops` is called, and where Numba is missing, Python runs the same functions on lists, and comes to
the same to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, TypeVar

import numpy.typing as npt

_logger = logging.getLogger(__name__)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class Loop(Generic[_Given, _Result]):
    """A function of tables and numbers, run by Python or as machine code.

    Args:
        function: that Numba can compile.
    """

    def __init__(self, function: Callable[_Given, _Result]) -> None:
        update_wrapper(self, function)
        self._in_python = function
        self.runs: Callable[_Given, _Result] = function
        _loops.append(self)

    def __call__(self, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        """Run it."""
        return self.runs(*args, **kwargs)

    def compile(self) -> None:
        """From now on, run it as machine code, which is made at its first call and kept on disk where there is room."""
        from numba import njit

        machine_code: Any
        try:
            machine_code = njit(cache=True)(self._in_python)
        except RuntimeError:  # no folder may be written
            machine_code = njit(self._in_python)
        self.runs = machine_code

    def interpret(self) -> None:
        """From now on, let Python run it."""
        self.runs = self._in_python


_loops: list[Loop[Any, Any]] = []


class _Now:
    """How it is now.

    Attributes:
        is_compiled: whether loops run as machine code.
    """

    is_compiled = False


def is_compiled() -> bool:
    """Whether loops run as machine code now."""
    return _Now.is_compiled


def given(table: npt.NDArray[Any]) -> Any:
    """A table in the form that loops take now: an array, or lists."""
    return table if _Now.is_compiled else table.tolist()


def compile_loops(first_calls: Callable[[], object]) -> bool:
    """Run loops as machine code from now on.

    Args:
        first_calls: calls each of them.

    Returns:
        Whether they do: not without Numba, or with one that can't compile them, which is logged.
    """
    try:
        for loop in _loops:
            loop.compile()
        _Now.is_compiled = True
        first_calls()
    except Exception as problem:  # whatever is wrong with that installation, training goes on
        interpret_loops()
        if not isinstance(problem, ModuleNotFoundError):
            _logger.warning("planning stays in Python, since Numba failed: %s", problem)
    return _Now.is_compiled


def interpret_loops() -> None:
    """Let Python run them from now on."""
    _Now.is_compiled = False
    for loop in _loops:
        loop.interpret()
