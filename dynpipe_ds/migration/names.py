"""What every rank knows by name: what a layer refers to, but does not own.

All ranks run the same script over the same layer list. So an object has a name that both ends of a move know if a path
leads to it from a layer's ``LayerSpec``, from the pipeline module, from the engine or from a module's globals, or if
several live layers of the list held it at the start. A layer that moves is bound to the receiver's own object of that
name.
"""

from __future__ import annotations

import argparse
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from dynpipe_ds.host.specs import LayerSpec

Path = tuple[Any, ...]
"""Name of a root, then steps: ("attr", name), ("item", key), ("cell", i), ("default", i)."""

Values = dict[str, str]
"""Plain values in an object, as text, by path."""

ATOMS = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType, types.NotImplementedType)
GLOBALS = "globals"
"""The root of names that begin at a module: ``("globals", "package.module", ("attr", name), ...)``."""

_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "deepspeed", "numpy"} - {"__main__"})
"""Packages whose objects are not looked into."""
_PLAIN_OBJECTS = (argparse.Namespace, types.SimpleNamespace, LayerSpec, partial)
MOST_ITEMS = 10_000
"""Of a larger container (a vocabulary, a data set) the items have no names: to look at them takes too long."""
_SIZED = (dict, list, tuple, deque)
_NAMELESS = (*ATOMS, type, types.ModuleType, tuple, frozenset)
"""Never bound: by value, or by another kind of name."""
_NO_SCRIPT = ("site-packages", "dist-packages")


def is_a(obj: Any, kinds: type | tuple[type, ...]) -> bool:
    """``isinstance`` that asks the object nothing: one that stands in for another may raise.

    Args:
        obj: any object.
        kinds: classes.
    """
    return issubclass(type(obj), kinds)


def package_of(obj: Any) -> str:
    """The first part of the name of the module that defines an object's class.

    Args:
        obj: any object.
    """
    return str(getattr(type(obj), "__module__", None) or "").partition(".")[0]


def children(obj: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """What an object refers to, each with the step that leads there.

    Args:
        obj: any object; those of Python's, torch's, DeepSpeed's and NumPy's own classes are not looked into, except
            containers and modules.
    """
    # A container's own methods are not called: one that fills itself when it is read may fail, or take long.
    if is_a(obj, _SIZED) and _built_in(obj).__len__(obj) > MOST_ITEMS:
        return
    if is_a(obj, dict):
        yield from ((("item", key), value) for key, value in list(dict.items(obj)) if is_a(key, ATOMS))
    elif is_a(obj, (list, tuple, deque)):
        yield from ((("item", i), value) for i, value in enumerate(list(_built_in(obj).__iter__(obj))))
    elif is_a(obj, types.MethodType):
        yield ("attr", "__self__"), obj.__self__
    elif is_a(obj, types.FunctionType):
        yield from _of_function(obj)
    elif is_a(obj, type):
        if obj.__module__.partition(".")[0] not in _FOREIGN:
            yield from ((("attr", name), value) for name, value in list(vars(obj).items()) if not name.startswith("__"))
            if isinstance(vars(obj).get("__init__"), types.FunctionType):
                yield ("attr", "__init__"), vars(obj)["__init__"]
    elif is_a(obj, partial):
        yield from ((("attr", name), getattr(obj, name)) for name in ("func", "args", "keywords"))
    elif is_a(obj, (nn.Module, *_PLAIN_OBJECTS)) or package_of(obj) not in _FOREIGN:
        yield from ((("attr", name), value) for name, value in list(getattr(obj, "__dict__", {}).items()))
        for name in _slots(type(obj)):
            if hasattr(obj, name):
                yield ("attr", name), getattr(obj, name)


def _built_in(container: Any) -> Any:
    """Python's own class of a container."""
    return next(kind for kind in _SIZED if is_a(container, kind))


def _of_function(function: types.FunctionType) -> Iterator[tuple[tuple[str, Any], Any]]:
    for i, cell in enumerate(function.__closure__ or ()):
        try:
            yield ("cell", i), cell.cell_contents
        except ValueError:  # a variable without a value
            continue
    yield from ((("default", i), value) for i, value in enumerate(function.__defaults__ or ()))


def _slots(cls: type) -> list[str]:
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] not in _FOREIGN]
    found = (vars(base).get("__slots__", ()) for base in bases)
    names = [name for slots in found for name in ([slots] if isinstance(slots, str) else slots)]
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def child(obj: Any, step: tuple[str, Any]) -> Any:
    """What a step leads to.

    Args:
        obj: where it begins.
        step: from :func:`children`.

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
    """A path as one would write it in Python.

    Args:
        path: a root and steps.
    """
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


class Names:
    """Paths to objects, and back.

    Args:
        roots: where paths begin; every rank has the same ones.
        leaves: roots of which only the attributes have names, not what those hold.
        owned: what belongs to layers of this rank; it has no name, and none leads through it.
        shared: paths of modules and tensors that several layers hold, and that so belong to none; agreed by all ranks.
        start: plain values of what layers are bound to, as they were before training, by path; extended here.
        trees: roots of which layers may be parts, such as a whole model in the arguments of every layer.
    """

    def __init__(
        self, roots: Mapping[str, Any] | None = None, leaves: Mapping[str, Any] | None = None, *,
        owned: Iterable[Any] = (), shared: Iterable[Path] = (), start: dict[Path, Values] | None = None,
        trees: Mapping[str, Any] | None = None,
    ) -> None:
        self._trees = trees or {}
        self._parts: dict[int, Path] | None = None
        self._start = {} if start is None else start
        self._roots = {**(roots or {}), **(leaves or {})}
        self._leaves = leaves or {}
        self._owned = {id(part) for part in owned}
        self._paths: dict[int, Path] | None = None
        self._script: dict[int, Path] | None = None
        self.shared: dict[int, Path] = {}
        for path in shared:
            with suppress(LookupError):  # the script has put something else there
                self.shared[id(self.resolve(path))] = path

    def of(self, obj: Any) -> Path | None:
        """The path to an object, if there is one.

        Args:
            obj: any object.
        """
        if id(obj) in self.shared:
            return self.shared[id(obj)]
        if is_a(obj, _NAMELESS) or id(obj) in self._owned:
            return None
        if self._paths is None:
            self._paths = self._search(self._roots, stop=self._owned | {id(root) for root in self._leaves.values()})
            for name, leaf in self._leaves.items():
                self._paths.setdefault(id(leaf), (name,))
                for step, value in children_of_leaf(leaf):
                    if not is_a(value, (Tensor, *_NAMELESS)) and id(value) not in self._owned:
                        self._paths.setdefault(id(value), (name, step))
        return self._checked(self._paths.get(id(obj)), obj) or self._of_global(obj)

    def local(self, obj: Any) -> Path | None:
        """The path to a class or function that has no name of its own.

        Args:
            obj: a class or function.
        """
        self.of(self)  # searches
        assert self._paths is not None
        return self._checked(self._paths.get(id(obj)), obj)

    def changed(self, path: Path, values: Values) -> list[str]:
        """Which values of a bound object are others than at the start.

        Args:
            path: of the object.
            values: as they are now; those of an object that was not seen before count as its start.
        """
        before = self._start.setdefault(path, values)
        return [name for name, value in values.items() if before.get(name) != value]

    def claim(self, module: nn.Module) -> bool:
        """Take a module of this rank for a layer that arrives; false if another layer has it.

        Args:
            module: a part of the layer list's arguments.
        """
        is_free = id(module) not in self._owned
        self._owned.add(id(module))
        return is_free

    def part(self, module: nn.Module) -> Path | None:
        """The path to a module that belongs to a layer and is a part of something in the layer list's arguments, too.

        Args:
            module: a module of a layer.
        """
        if self._parts is None:
            self._parts = self._search(self._trees, stop=set())
        return self._checked(self._parts.get(id(module)), module)

    def deep(self, obj: Any) -> Path | None:
        """The path to an item of a dictionary at the level of a module, such as a table of process groups.

        Args:
            obj: an object without another name; all modules are searched for it.
        """
        for name, module in sys.modules.copy().items():
            for step, table in _globals_of(module) if is_a(module, types.ModuleType) else ():
                for key, value in list(table.items()) if type(table) is dict else ():
                    if value is obj and type(key) is str:
                        return (GLOBALS, name, step, ("item", key))
        return None

    def of_part(self, part: Any) -> Path | None:
        """The path to a module or tensor that layers hold, if it is certain to mean the same on every rank.

        Args:
            part: the module or tensor.
        """
        path = self.of(part)
        # Items may be counted by rank: the first layer in a script's dictionary of its layers.
        is_counted = path is not None and any(kind == "item" and type(key) is int for kind, key in path[2:])
        return None if path is not None and path[0] == GLOBALS and is_counted else path

    def resolve(self, path: Path) -> Any:
        """The object of this rank that a path leads to.

        Args:
            path: from any rank.

        Raises:
            LookupError: if it leads nowhere here.
        """
        steps: Sequence[Any]
        try:
            obj, steps = (sys.modules[path[1]], path[2:]) if path[0] == GLOBALS else (self._roots[path[0]], path[1:])
            for step in steps:
                obj = child(obj, step)
        except LookupError as error:
            raise LookupError(f"{spell(path)} does not exist there ({error})") from error
        return obj

    def _search(self, roots: Mapping[str, Any], stop: set[int]) -> dict[int, Path]:
        """Breadth first, so that each object gets one of its shortest paths."""
        queue: deque[tuple[Path, Any]] = deque(((name,), root) for name, root in roots.items() if id(root) not in stop)
        found: dict[int, Path] = {id(root): path for path, root in queue}
        while queue:
            path, obj = queue.popleft()
            for step, value in children(obj):
                if is_a(value, ATOMS) or is_a(value, types.ModuleType) or id(value) in found or id(value) in stop:
                    continue
                found[id(value)] = (*path, step)
                if not is_a(value, (Tensor, np.ndarray)):
                    queue.append(((*path, step), value))
        return found

    def _of_global(self, obj: Any) -> Path | None:
        if self._script is None:
            self._script = {}
            for name, module in _new_modules():
                self._scan_script(name, module)
        return self._checked(self._script.get(id(obj)) or _of_packages.get(id(obj)), obj)

    def _checked(self, path: Path | None, obj: Any) -> Path | None:
        """The path if it leads to the object: an ``id`` is given again when its object is gone."""
        try:
            return path if path is not None and self.resolve(path) is obj else None
        except LookupError:
            return None

    def _scan_script(self, name: str, module: types.ModuleType) -> None:
        """Note a module's globals, and what they hold by attribute or key."""
        assert self._script is not None
        queue: deque[tuple[Path, Any]] = deque([((GLOBALS, name), module)])
        while queue:
            path, obj = queue.popleft()
            found = _globals_of(module) if obj is module else children(obj)
            for step, value in found:
                if is_a(value, _NAMELESS) or id(value) in self._script or id(value) in self._owned:
                    continue
                if id(value) in (self._paths or ()):
                    continue
                self._script[id(value)] = (*path, step)
                # Layers may have filled a list: what its first item is differs between ranks.
                if not is_a(value, (list, deque, types.FunctionType, Tensor, np.ndarray)):
                    queue.append(((*path, step), value))


_of_packages: dict[int, Path] = {}
_seen_packages: set[str] = set()
"""Globals of modules that are not the script's own, and those modules: looked at once, since they are thousands."""


def _new_modules() -> Iterator[tuple[str, types.ModuleType]]:
    """The script's own modules; others are noted."""
    for name, module in sys.modules.copy().items():
        if not is_a(module, types.ModuleType) or name in _seen_packages:
            continue
        if name == "__main__" or _is_script(name, module):
            yield name, module
            continue
        _seen_packages.add(name)
        for step, value in _globals_of(module):
            if not is_a(value, _NAMELESS):
                _of_packages.setdefault(id(value), (GLOBALS, name, step))


def _globals_of(module: types.ModuleType) -> Iterator[tuple[tuple[str, Any], Any]]:
    yield from ((("attr", key), value) for key, value in list(vars(module).items()) if not key.startswith("__"))


class NoNames(Names):
    """Nothing has a name besides classes and functions."""

    def of(self, obj: Any) -> Path | None:
        """No path.

        Args:
            obj: any object.
        """
        return None

    def deep(self, obj: Any) -> Path | None:
        """No path.

        Args:
            obj: any object.
        """
        return None

    def part(self, module: nn.Module) -> Path | None:
        """No path.

        Args:
            module: a module of a layer.
        """
        return None

    def local(self, obj: Any) -> Path | None:
        """No path.

        Args:
            obj: a class or function.
        """
        return None


def children_of_leaf(leaf: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    """The attributes of an object of any class.

    Args:
        leaf: the object.
    """
    yield from ((("attr", name), value) for name, value in list(getattr(leaf, "__dict__", {}).items()))


def _is_script(name: str, module: types.ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    package = name.partition(".")[0]
    return (
        path is not None and package not in _FOREIGN and package != "dynpipe_ds"
        and not any(part in path for part in _NO_SCRIPT)
    )


def shared_by(layers: Iterable[nn.Module]) -> list[Any]:
    """What several live layers refer to, in an order that is the same on every rank.

    Args:
        layers: the live layers of the layer list.
    """
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
    return [value for value in kept.values() if not is_a(value, _NAMELESS)]
