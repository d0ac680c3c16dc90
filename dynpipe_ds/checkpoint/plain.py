"""What is saved can be loaded: values become plain ones before they are written, or are refused by their path.

Files are read with ``weights_only=True``, which runs no code and knows few classes. Which ones, torch itself says:
whatever is not obviously plain is written to memory and read back.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import os
import warnings
from pathlib import PurePath
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.serialization import load, save

from dynpipe_ds.checkpoint.manifest import CheckpointError
from dynpipe_ds.host.optimizer_files import first_line, known_classes

_PLAIN = (type(None), bool, float, complex, str, bytes)
_DICTS = (dict, collections.OrderedDict, collections.Counter)
_SEQUENCES = (list, tuple, set)
_TENSORS = (Tensor, nn.Parameter)
_SMALL_BITS = 64  # of integers that surely can be read back
_NAMED = 3  # values that one message names

# What to store instead, by the first class that fits.
_INSTEAD: tuple[tuple[tuple[type, ...], str], ...] = (
    ((enum.Enum,), "its .value"),
    ((int, float, decimal.Decimal, fractions.Fraction), "str(value), or a number of Python's or torch's own"),
    ((datetime.date, datetime.time), "value.isoformat()"),
    ((datetime.timedelta,), "value.total_seconds()"),
    ((dict,), "dict(value)"),
    ((tuple,), "tuple(value)"),
    ((frozenset, collections.deque, range), "list(value)"),
    ((numpy.ndarray,), "value.tolist()"),
)


def plain(value: Any, name: str) -> Any:
    """A copy of containers in which every value can be read back; tensors and what is plain already are shared.

    NumPy's numbers become Python's, its arrays tensors, paths text. A class that the caller has allowed with
    ``torch.serialization.add_safe_globals`` stays. Shared references and cycles (of
    lists and dicts) stay what they are.

    Args:
        value: what shall be stored.
        name: what messages call it.

    Returns:
        What to store.

    Raises:
        CheckpointError: naming the path and the class of what can't be read back, and what to store instead.
    """
    walk = _Walk()
    try:
        result = walk.take(value, (name,))
    except RecursionError:
        raise CheckpointError(
            f"{name} is nested too deeply to be stored; make it flatter"
        ) from None
    walk.check()
    return result


class _Walk:
    def __init__(self) -> None:
        self._allowed = set(torch.serialization.get_safe_globals())
        self._taken: dict[int, Any] = {}  # what became of a container or an array, by its id
        self._odd: list[tuple[tuple[Any, ...], Any]] = []  # path and value of what may not be readable

    def take(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in _PLAIN or (kind is int and value.bit_length() < _SMALL_BITS) or kind in self._allowed:
            return value
        if kind in _TENSORS:
            if vars(value):
                self._odd.append((path, vars(value)))  # pickled along with it
            return value
        if id(value) in self._taken:
            return self._taken[id(value)]
        if kind in _DICTS:
            items = self._taken[id(value)] = kind()
            for key, item in value.items():
                items[self.take(key, (*path, key))] = self.take(item, (*path, key))
            if kind is not dict:  # a state_dict's metadata
                vars(items).update(vars(value))
            return items
        if kind in _SEQUENCES:
            entries: list[Any] = []
            if kind is list:  # may hold itself
                self._taken[id(value)] = entries
            for i, item in enumerate(value):  # no comprehension: one call a level, so that depth is pickle's to limit
                entries.append(self.take(item, (*path, i)))
            if kind is tuple and id(value) in self._taken:  # a tuple that holds itself, by a list
                self._odd.append((path, value))
            return self._taken.setdefault(id(value), kind(entries))
        return self._converted(value, path)

    def _converted(self, value: Any, path: tuple[Any, ...]) -> Any:
        if isinstance(value, PurePath):
            return os.fspath(value)
        if isinstance(value, numpy.generic) and type(item := value.item()) in (*_PLAIN, int):
            return item
        if type(value) is numpy.ndarray and value.dtype.kind in "biufc" and value.dtype.isnative:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # of arrays that can't be written to: nobody does
                copy = self._taken[id(value)] = torch.from_numpy(numpy.ascontiguousarray(value).reshape(value.shape))
            return copy
        self._odd.append((path, value))
        return value

    def check(self) -> None:
        """Read back whatever is not surely readable."""
        if not self._odd or not (together := _problem([value for _, value in self._odd])):
            return
        problems = [(path, value, text) for path, value in self._odd if (text := _problem(value))]
        problems = problems or [(*self._odd[0], together)]
        named = "; ".join(f"{_written(path)} is {_class(value)} ({text})" for path, value, text in problems[:_NAMED])
        more = f", and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise CheckpointError(
            f"{named}{more}, and could not be loaded again; store {_instead(problems[0][1])}, or allow the class with "
            "torch.serialization.add_safe_globals([...]) before saving and loading"
        )


def _problem(value: Any) -> str:
    """Why a value can't be read back; empty if it can."""
    buffer = io.BytesIO()
    try:
        save(value, buffer)
        buffer.seek(0)
        with torch.serialization.safe_globals(known_classes()):
            load(buffer, weights_only=True)
    except Exception as error:  # noqa: BLE001 - a class of the user's may raise anything when it is pickled
        return first_line(error).partition(" was not an allowed")[0]
    return ""


def _written(path: tuple[Any, ...]) -> str:
    return str(path[0]) + "".join(f"[{key!r}]" for key in path[1:])


def _class(value: Any) -> str:
    kind = type(value)
    return f"of class {kind.__module__}.{kind.__qualname__}"


def _instead(value: Any) -> str:
    for classes, text in _INSTEAD:
        if isinstance(value, classes):
            return text
    if dataclasses.is_dataclass(value) or type(value).__name__.endswith("Namespace"):
        return "vars(value)"
    return "what is plain of it (numbers, texts, tensors, and tuples, lists, sets and dicts of them)"
