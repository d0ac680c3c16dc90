"""What an object refers to, step by step, and the paths that such steps make.

Objects are only looked at: a container's own methods are not called, since one that fills itself when it is read may
fail, or take long.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from dynpipe_ds.functions import contents_of
from dynpipe_ds.host.specs import LayerSpec

Step = tuple[str, Any]
"""("attr", name), ("item", key), ("cell", i) or ("default", i)."""
Path = tuple[Any, ...]
"""Name of a root, then steps."""

GLOBALS = "globals"
"""The root of paths that begin at a module: ``("globals", "package.module", ("attr", name), ...)``."""
ATOMS = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType, types.NotImplementedType)
NAMELESS = (*ATOMS, type, types.ModuleType, tuple, frozenset)
"""What no path stands for: it goes by value, or by another kind of name."""
FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "deepspeed", "numpy"} - {"__main__"})
"""Packages whose objects are not looked into."""

_PLAIN_OBJECTS = (argparse.Namespace, types.SimpleNamespace, LayerSpec, partial)
_SIZED = (dict, list, tuple, deque)
_MOST_ITEMS = 10_000  # of a larger container (a vocabulary, a data set) they are not looked at: it takes too long


def is_a(obj: Any, kinds: type | tuple[type, ...]) -> bool:
    """``isinstance`` that asks the object nothing: one that stands in for another may raise."""
    return issubclass(type(obj), kinds)


def children(obj: Any) -> Iterator[tuple[Step, Any]]:
    """What an object refers to, each with the step that leads there.

    Objects of Python's, torch's, DeepSpeed's and NumPy's own classes are not looked into, except containers and
    modules.
    """
    if is_a(obj, _SIZED) and _built_in(obj).__len__(obj) > _MOST_ITEMS:
        return
    if is_a(obj, dict):
        yield from ((("item", key), value) for key, value in list(dict.items(obj)) if is_a(key, ATOMS))
    elif is_a(obj, (list, tuple, deque)):
        yield from ((("item", i), value) for i, value in enumerate(list(_built_in(obj).__iter__(obj))))
    elif is_a(obj, types.MethodType):
        yield ("attr", "__self__"), obj.__self__
    elif is_a(obj, types.FunctionType):
        yield from _of_function(obj)
    elif is_a(obj, types.ModuleType):
        yield from _not_special(obj)
    elif is_a(obj, type):
        if not _is_foreign(obj):
            yield from _not_special(obj)
            if isinstance(vars(obj).get("__init__"), types.FunctionType):
                yield ("attr", "__init__"), vars(obj)["__init__"]
    elif is_a(obj, partial):
        yield from ((("attr", name), getattr(obj, name)) for name in ("func", "args", "keywords"))
    elif is_a(obj, (nn.Module, *_PLAIN_OBJECTS)) or not _is_foreign(type(obj)):
        yield from attributes(obj)
        for name in _slots(type(obj)):
            if hasattr(obj, name):
                yield ("attr", name), getattr(obj, name)


def attributes(obj: Any) -> Iterator[tuple[Step, Any]]:
    """What an object of any class has in its own dictionary, each with its step."""
    return ((("attr", name), value) for name, value in list(getattr(obj, "__dict__", {}).items()))


def _not_special(obj: Any) -> Iterator[tuple[Step, Any]]:
    return ((step, value) for step, value in attributes(obj) if not step[1].startswith("__"))


def _is_foreign(cls: Any) -> bool:
    return str(getattr(cls, "__module__", None) or "").partition(".")[0] in FOREIGN


def _built_in(container: Any) -> Any:
    """Python's own class of a container."""
    return next(kind for kind in _SIZED if is_a(container, kind))


def _of_function(function: types.FunctionType) -> Iterator[tuple[Step, Any]]:
    for i, cell in enumerate(function.__closure__ or ()):
        yield from ((("cell", i), value) for value in contents_of(cell))
    yield from ((("default", i), value) for i, value in enumerate(function.__defaults__ or ()))


def _slots(cls: type) -> list[str]:
    found = (vars(base).get("__slots__", ()) for base in cls.__mro__ if not _is_foreign(base))
    names = [name for slots in found for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def child(obj: Any, step: Step) -> Any:
    """What a step of :func:`children` leads to.

    Raises:
        LookupError: if it leads nowhere.
    """
    kind, key = step
    try:
        if kind == "item":
            return _built_in(obj).__getitem__(obj, key)
        if kind == "cell":
            return obj.__closure__[key].cell_contents
        if kind == "default":
            return obj.__defaults__[key]
        own = getattr(obj, "__dict__", {})
        return own[key] if key in own else getattr(obj, key)
    except Exception as error:
        raise LookupError(f"no {spell(('', step))}") from error


def spell(path: Path) -> str:
    """A path as one would write it in Python."""
    text, rest = (str(path[1]), path[2:]) if path[0] == GLOBALS else (str(path[0]), path[1:])
    steps = list(rest)
    while steps:
        kind, key = steps.pop(0)
        if kind == "attr" and key in ("_modules", "_parameters", "_buffers") and steps:
            text += f".{steps.pop(0)[1]}"
        elif kind == "attr":
            text += f".{key}"
        elif kind == "item":
            text += f"[{key!r}]"
        else:
            text += f" ({'variable' if kind == 'cell' else 'default'} {key})"
    return text.removeprefix(".")


def shared_by(layers: Iterable[nn.Module]) -> list[Any]:
    """What several live layers of the layer list refer to, in an order that is the same on every rank."""
    first: dict[int, int] = {}
    kept: dict[int, Any] = {}
    for number, layer in enumerate(layers):
        seen = {id(layer)}
        queue: deque[Any] = deque([layer])
        while queue:
            for _, value in children(queue.popleft()):
                if is_a(value, ATOMS) or id(value) in seen or is_a(value, types.ModuleType):
                    continue
                seen.add(id(value))
                if first.setdefault(id(value), number) != number:
                    kept.setdefault(id(value), value)
                elif not is_a(value, (Tensor, np.ndarray, type)):
                    queue.append(value)
    return [value for value in kept.values() if not is_a(value, NAMELESS)]
