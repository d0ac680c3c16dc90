"""What every rank knows by name: what a layer refers to, but does not own.

All ranks run the same script over the same layer list. So an object has a name that both ends of a move know if a path
leads to it from a layer's ``LayerSpec``, from the pipeline module, from the engine or from a module's globals, or if
several live layers of the list held it at the start. A layer that moves is bound to the receiver's own object of that
name.
"""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor, nn

from dynpipe_ds.migration.references import (
    ATOMS,
    FOREIGN,
    GLOBALS,
    NAMELESS,
    Path,
    attributes,
    child,
    children,
    is_a,
    spell,
)

Values = dict[str, str]
"""Plain values in an object, as text, by path."""

Found = dict[int, Path]
"""Paths by the ``id`` of what they lead to."""

_NO_SCRIPT = ("site-packages", "dist-packages")


class Names:
    """Paths to objects, and back.

    Args:
        roots: where paths begin; every rank has the same ones.
        leaves: roots of which only the attributes have names, not what those hold.
        owned: what belongs to layers of this rank; it has no name, and none leads through it.
        shared: paths of modules and tensors that several layers hold, and that so belong to none; agreed by all ranks.
        start: plain values of what layers are bound to, as they were before training, by path; extended here.
        trees: roots of which layers may be parts, such as a whole model in the arguments of every layer.
        with_globals: whether what modules have as globals has a name.
    """

    def __init__(
        self, roots: Mapping[str, Any] | None = None, leaves: Mapping[str, Any] | None = None, *,
        owned: Iterable[Any] = (), shared: Iterable[Path] = (), start: dict[Path, Values] | None = None,
        trees: Mapping[str, Any] | None = None, with_globals: bool = True,
    ) -> None:
        self._trees = trees or {}
        self._parts: Found | None = None
        self._start = {} if start is None else start
        self._roots = {**(roots or {}), **(leaves or {})}
        self._leaves = leaves or {}
        self._owned = {id(part) for part in owned}
        self._paths: Found | None = None
        self._script: Found | None = None
        self._with_globals = with_globals
        self.shared: Found = {}
        for path in shared:
            with suppress(LookupError):  # the script has put something else there
                self.shared[id(self.resolve(path))] = path

    def of(self, obj: Any) -> Path | None:
        """The path to an object, if there is one."""
        if id(obj) in self.shared:
            return self.shared[id(obj)]
        if is_a(obj, NAMELESS) or id(obj) in self._owned:
            return None
        return self._checked(self._found().get(id(obj)), obj) or self._of_global(obj)

    def local(self, obj: Any) -> Path | None:
        """The path to a class or function that has no name of its own."""
        return self._checked(self._found().get(id(obj)), obj)

    def _found(self) -> Found:
        if self._paths is None:
            self._paths = _search(self._roots, self._owned | {id(root) for root in self._leaves.values()})
            for name, leaf in self._leaves.items():
                self._paths.setdefault(id(leaf), (name,))
                for step, value in attributes(leaf):
                    if not is_a(value, (Tensor, *NAMELESS)) and id(value) not in self._owned:
                        self._paths.setdefault(id(value), (name, step))
        return self._paths

    def changed(self, path: Path, values: Values) -> list[str]:
        """Which values of a bound object are others than at the start.

        Args:
            path: of the object.
            values: as they are now; those of an object that was not seen before count as its start.
        """
        before = self._start.setdefault(path, values)
        return [name for name, value in values.items() if before.get(name) != value]

    def claim(self, module: nn.Module) -> bool:
        """Take a part of the layer list's arguments for a layer that arrives; false if another layer has it."""
        is_free = id(module) not in self._owned
        self._owned.add(id(module))
        return is_free

    def part(self, module: nn.Module) -> Path | None:
        """The path to a layer's module that is a part of something in the layer list's arguments, too."""
        if self._parts is None:
            self._parts = _search(self._trees, frozenset())
        return self._checked(self._parts.get(id(module)), module)

    def deep(self, obj: Any) -> Path | None:
        """The path to an item of a dictionary at the level of any module, such as a table of process groups."""
        modules = sys.modules.copy() if self._with_globals else {}
        for name, module in modules.items():
            for step, table in children(module) if is_a(module, types.ModuleType) else ():
                for key, value in list(table.items()) if type(table) is dict else ():
                    if value is obj and type(key) is str:
                        return (GLOBALS, name, step, ("item", key))
        return None

    def of_part(self, part: Any) -> Path | None:
        """The path to a module or tensor that layers hold, if it is certain to mean the same on every rank."""
        path = self.of(part)
        # Items may be counted by rank: the first layer in a script's dictionary of its layers.
        is_counted = path is not None and any(kind == "item" and type(key) is int for kind, key in path[2:])
        return None if path is not None and path[0] == GLOBALS and is_counted else path

    def resolve(self, path: Path) -> Any:
        """The object of this rank that a path of any rank leads to.

        Raises:
            LookupError: if it leads nowhere here.
        """
        try:
            obj, steps = (sys.modules[path[1]], path[2:]) if path[0] == GLOBALS else (self._roots[path[0]], path[1:])
            for step in steps:
                obj = child(obj, step)
        except LookupError as error:
            raise LookupError(f"{spell(path)} does not exist there ({error})") from error
        return obj

    def _of_global(self, obj: Any) -> Path | None:
        if not self._with_globals:
            return None
        if self._script is None:
            self._script, known = {}, {*self._owned, *self._found()}
            # Layers may have filled a list: what its first item is differs between ranks.
            leaves = (list, deque, types.FunctionType, Tensor, np.ndarray)
            for path, module in _new_modules():
                _spread([(path, module)], self._script, known, without=NAMELESS, leaves=leaves)
        return self._checked(self._script.get(id(obj)) or _of_packages.get(id(obj)), obj)

    def _checked(self, path: Path | None, obj: Any) -> Path | None:
        """The path if it leads to the object: an ``id`` is given again when its object is gone."""
        try:
            return path if path is not None and self.resolve(path) is obj else None
        except LookupError:
            return None


def no_names() -> Names:
    """Nothing has a name besides classes and functions."""
    return Names(with_globals=False)


def _search(roots: Mapping[str, Any], stop: Container[int]) -> Found:
    begin: list[tuple[Path, Any]] = [((name,), root) for name, root in roots.items() if id(root) not in stop]
    found: Found = {id(root): path for path, root in begin}
    _spread(begin, found, stop, without=(*ATOMS, types.ModuleType), leaves=(Tensor, np.ndarray))
    return found


def _spread(
    begin: Iterable[tuple[Path, Any]], found: Found, stop: Container[int], *, without: tuple[type, ...],
    leaves: tuple[type, ...],
) -> None:
    """Find what objects lead to, breadth first, so that each gets one of its shortest paths.

    Args:
        begin: the objects.
        found: what was found before, extended here.
        stop: ``id`` of what gets no path here, and through which none leads.
        without: kinds of objects of which the same is true.
        leaves: kinds of objects that are not looked into.
    """
    queue = deque(begin)
    while queue:
        path, obj = queue.popleft()
        for step, value in children(obj):
            if is_a(value, without) or id(value) in found or id(value) in stop:
                continue
            found[id(value)] = (*path, step)
            if not is_a(value, leaves):
                queue.append(((*path, step), value))


_of_packages: Found = {}
_seen_packages: set[str] = set()
"""Globals of modules that are not the script's own, and those modules: looked at once, since they are thousands."""


def note_packages() -> None:
    """Look at all packages that are imported; processes that are forked from this one need not."""
    for _ in _new_modules():
        pass


def _new_modules() -> Iterator[tuple[Path, types.ModuleType]]:
    """The script's own modules, with their paths; others are noted."""
    modules = sys.modules.copy()
    for name in [name for name in modules if name not in _seen_packages]:
        module = modules[name]
        if not is_a(module, types.ModuleType):
            continue
        path = (GLOBALS, name)
        if name == "__main__" or _is_script(name, module):
            yield path, module
            continue
        _seen_packages.add(name)
        for step, value in children(module):
            if not is_a(value, NAMELESS):
                _of_packages.setdefault(id(value), (*path, step))


def _is_script(name: str, module: types.ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    package = name.partition(".")[0]
    return (
        path is not None and package not in FOREIGN and package != "dynpipe_ds"
        and not any(part in path for part in _NO_SCRIPT)
    )
