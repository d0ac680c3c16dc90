"""An object graph as plain values and tensors: what a layer owns by value, what it refers to by name.

Encoded values are atoms and *nodes*: tuples of a kind and what :class:`~dynpipe_ds.migration.decoding.Decoder` takes
to make one of that kind. No code is among them: classes and functions are named, and what is made anew without a name
(a lambda, a class inside a function) is taken from the layer that the receiver builds from the same ``LayerSpec``, its
*template*, and filled with what the sender's holds.
"""

from __future__ import annotations

import copyreg
import enum
import logging
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.functions import contents_of
from dynpipe_ds.migration.callables import LOCKS, MAKERS, digest_of, elsewhere, full_name, how_made, named
from dynpipe_ds.migration.compiled import (
    CALL,
    UnreadableError,
    is_compiled_function,
    is_compiled_module,
    original_of,
    recipe_of,
)
from dynpipe_ds.migration.names import Names
from dynpipe_ds.migration.references import ATOMS, Path, is_a
from dynpipe_ds.migration.usual import TABLES, is_usual

HOOK_TABLES = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

_NEW, _NEW_EX = copyreg.__newobj__, copyreg.__newobj_ex__  # type: ignore[attr-defined]
_INTERNAL = frozenset(vars(nn.Module()))
_OF_WRAPPER = _INTERNAL - {"training", "_parameters", "_buffers", "_modules"}  # the others are the original's
_WITHOUT_FORM = (types.GeneratorType, types.CoroutineType, torch.jit.ScriptModule, torch.jit.ScriptFunction)


class CantCarryError(TypeError):
    """A value that has no form in which it could travel.

    Args:
        what: it is, and why not.
        path: where it was found.
    """

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(f"{path or 'it'} holds {what}")


Taken = dict[int, tuple[int, Any, str]]
"""Objects that were found, each once, by ``id``: its number, itself (which keeps the id), and where it was."""


class Encoder:
    """Encodes what belongs together: an object that occurs twice is one object on the other side, too.

    Args:
        tensors: takes the tensors.
        names: what the other side knows by name.
        device: the sender's; becomes the receiver's.
        own: ``id`` of tensors that are never bound.
        may_build: whether the receiver can build a template.

    Attributes:
        bound: what is bound, by path.
        built: what only the template has, and where.
        built_hooks: the same, of hooks, without which a layer can move.
        lost: hooks and attributes that can't be carried, one sentence each.
        runs_code: whether decoding runs code that may read tensors, so that they must have come.
    """

    def __init__(
        self, tensors: Taken, names: Names, device: torch.device | None = None, own: Iterable[int] = (), *,
        may_build: bool = False,
    ) -> None:
        self._tensors = tensors
        self._names = names
        self._device = device
        self._own = frozenset(own)
        self._memo: Taken = {}
        self.bound: dict[Path, Any] = {}
        self._may_build = may_build
        self.built: list[str] = []
        self.built_hooks: list[str] = []
        self.lost: list[str] = []
        self.runs_code = False

    def encode(self, obj: Any, path: str = "") -> Any:
        """Encode a value; messages say where it is.

        Raises:
            CantCarryError: naming what can't travel, and where.
        """
        if type(obj) in ATOMS:
            return obj
        known = self._memo.get(id(obj))
        if known is not None:
            return ("memo", known[0])
        if is_a(obj, Tensor) and obj.layout == torch.strided:
            return self._tensor(obj, path)
        found = self._names.of(obj)
        if found is not None:
            return self._bound(found, obj)
        return self._by_kind(obj, path)

    def trial(self, obj: Any, path: str, what: str, *, may_build: bool) -> list[Any]:
        """Encode a value without which its layer can move.

        Args:
            obj: the value.
            path: where it is.
            what: it is, for the sentence in ``lost``.
            may_build: whether the template may have it.

        Returns:
            Plain values, as the only item; nothing if it can't be carried, and then nothing is left of the attempt.
        """
        tables: list[dict[Any, Any]] = [self._memo, self._tensors, self.bound]
        marks = [len(table) for table in tables]
        num_built = len(self.built)
        before, self._may_build = self._may_build, self._may_build and may_build
        try:
            node = self.encode(obj, path)
            self.built_hooks += self.built[num_built:]
            return [node]
        except CantCarryError as error:
            for table, mark in zip(tables, marks, strict=True):
                while len(table) > mark:
                    table.popitem()
            self.lost.append(f"{what} can't be carried and stays behind ({error})")
            return []
        finally:
            del self.built[num_built:]
            self._may_build = before

    def _build(self, path: str, what: str) -> None:
        """Note what only the template has."""
        if not self._may_build:
            raise CantCarryError(f"{what}, which has no name outside of this process", path)
        self.built.append(f"{path} ({what})")

    def unnamed(self) -> list[tuple[Any, str]]:
        """What went by value and can change, and where it was."""
        values = [(obj, path) for _, obj, path in self._memo.values() if _can_change(obj)]
        return [*values, *((tensor, path) for _, tensor, path in self._tensors.values())]

    # -- kinds --------------------------------------------------------------------------------

    def _remember(self, obj: Any, path: str) -> int:
        return _number(self._memo, obj, path)

    def _bound(self, found: Path, obj: Any) -> Any:
        self.bound.setdefault(found, obj)
        return ("bound", found, full_name(type(obj)))

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        if id(tensor) not in self._own:
            found = self._names.of(tensor)
            if found is not None:
                return self._bound(found, tensor)
        if type(tensor) not in (Tensor, nn.Parameter):
            raise CantCarryError(f"a tensor of class {full_name(type(tensor))}, which is more than its numbers", path)
        return ("tensor", _number(self._tensors, tensor, path))

    def _by_kind(self, obj: Any, path: str) -> Any:
        cls = type(obj)
        if cls is tuple:
            return ("tuple", self._items(obj, path))
        if cls is list:
            return ("list", self._remember(obj, path), self._items(obj, path))
        if cls is dict:
            return ("dict", self._remember(obj, path), self._pairs(obj.items(), path))
        if cls is set:
            return ("set", self._remember(obj, path), [self.encode(value, path) for value in obj])
        if cls is frozenset:
            return ("frozenset", [self.encode(value, path) for value in obj])
        if is_a(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            return self._code(obj, path)
        if cls is types.MethodType:
            return self._method(obj, path)
        if is_a(obj, (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)):
            return ("method", self._code(obj.__objclass__, path), obj.__name__)
        if is_a(obj, enum.Enum):
            return ("method", self._class(cls, path), obj.name)
        if cls is torch.Generator:
            state = (obj.device.type, _number(self._tensors, obj.get_state(), path))
            self.runs_code = True
            return ("generator", self._remember(obj, path), *state)
        if cls is torch.device and obj == self._device:
            return ("own_device",)
        if cls in (torch.dtype, torch.layout, torch.memory_format):
            return ("named", "torch", str(obj).removeprefix("torch."))
        return self._object(obj, path)

    def _method(self, method: types.MethodType, path: str) -> Any:
        owner, function = self.encode(method.__self__, f"{path}.__self__"), method.__func__
        if getattr(type(method.__self__), function.__name__, None) is function:
            return ("method", owner, function.__name__)
        return ("bind", self.encode(function, path), owner)

    def _items(self, items: Iterable[Any], path: str) -> list[Any]:
        return [v if type(v) in ATOMS else self.encode(v, f"{path}[{i}]") for i, v in enumerate(items)]

    def _pairs(self, items: Iterable[tuple[Any, Any]], path: str) -> list[tuple[Any, Any]]:
        return [
            (k if type(k) in ATOMS else self.encode(k, f"a key of {path}"),
             v if type(v) in ATOMS else self.encode(v, f"{path}[{k!r}]"))
            for k, v in items
        ]

    def _named(self, obj: Any) -> Any:
        """The node of a class or function that has a name, or to which a path leads; ``None`` for others."""
        module = str(getattr(obj, "__module__", None) or getattr(getattr(obj, "__self__", None), "__name__", ""))
        if named(module, obj.__qualname__) is obj:
            return ("named", module, obj.__qualname__)
        found = self._names.local(obj)
        return None if found is None else ("bound", found, full_name(type(obj)))

    def _code(self, obj: Any, path: str) -> Any:
        """A class or function: by its own name, by a path, or from the template."""
        owner = getattr(obj, "__self__", None)
        is_builtin = isinstance(obj, types.BuiltinFunctionType)
        if is_builtin and not is_a(owner, (types.NoneType, types.ModuleType, type)):
            return ("method", self.encode(owner, f"{path}.__self__"), obj.__name__)
        node = self._named(obj) or (elsewhere(obj) if is_builtin else None)
        if node is not None:
            return node
        if is_compiled_function(obj):
            return ("compiled", self._remember(obj, path), *self._compiled(obj, path))
        name = obj.__qualname__
        self._build(path, f"the {'function' if callable(obj) and not isinstance(obj, type) else 'class'} {name}")
        if isinstance(obj, types.FunctionType):
            number = self._remember(obj, path)
            variables = zip(obj.__closure__ or (), obj.__code__.co_freevars, strict=True)
            cells = [[self.encode(value, f"{path} (variable {variable})") for value in contents_of(cell)]
                     for cell, variable in variables]
            return ("function", number, name, digest_of(obj.__code__), cells,
                    self.encode(obj.__defaults__, path), self.encode(obj.__kwdefaults__, path))
        return ("built", self._remember(obj, path), name)

    def _object(self, obj: Any, path: str) -> Any:
        found = self._names.part(obj) if isinstance(obj, nn.Module) else None
        node = self._compiled_module(obj, path) if is_compiled_module(obj) else self._made_anew(obj, path)
        if found is not None:
            node = ("part", found, node)
        call = vars(obj).get(CALL) if isinstance(obj, nn.Module) else None
        return node if call is None else ("compiled_call", self._recipe(call, path), node)

    # -- what torch.compile made: what it was given, since no code travels ---------------------

    def _recipe(self, compiled: Any, path: str) -> Any:
        before, self._may_build = self._may_build, False  # the template's backend may be another one
        try:
            return self.encode(recipe_of(compiled), f"{path} (torch.compile)")
        except UnreadableError as error:
            raise CantCarryError(str(error), path) from error
        finally:
            self._may_build = before

    def _compiled(self, compiled: Any, path: str) -> tuple[Any, Any]:
        return self._recipe(compiled, path), self.encode(original_of(compiled), path)

    def _compiled_module(self, module: nn.Module, path: str) -> Any:
        recipe, original = self._recipe(module, path), self.encode(original_of(module), f"{path}._orig_mod".lstrip("."))
        own = [(key, self._of_module(table, key, path)) for key, table in vars(module).items() if key in _OF_WRAPPER]
        return ("compiled_module", self._remember(module, path), recipe, original, own)

    def _made_anew(self, obj: Any, path: str) -> Any:
        cls: type = type(obj)
        if is_a(obj, _WITHOUT_FORM):
            raise CantCarryError(f"a {full_name(cls)}, whose state can't be read", path)
        if isinstance(obj, nn.Module):
            class_node = self._named(cls)
            if class_node is None:  # parametrized ones refuse to be pickled
                return self._filled(obj, path)
            if is_usual(cls) and vars(obj).keys() >= TABLES.keys():
                return self._usual(obj, class_node, path)
        try:
            reduced = how_made(obj)
        except Exception as error:  # noqa: BLE001 - whatever a class raises, it says no
            return self._from_template(obj, path, str(error))
        if isinstance(reduced, str):  # the name of a global
            module = cls.__module__ if named(cls.__module__, reduced) is obj else str(getattr(obj, "__module__", ""))
            if named(module, reduced) is obj:
                return ("named", module, reduced)
            return self._from_template(obj, path, f"it calls itself {reduced}, which is something else")
        maker, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        if maker is _NEW or maker is _NEW_EX:
            plain = (arguments[1], arguments[2]) if maker is _NEW_EX else (arguments[1:], {})
            # Made for this call, so no path leads to them: looking for one would search all of the script's globals.
            nodes = [self._by_kind(given, f"{path}[{i}]") for i, given in enumerate(plain)]
            made_by = ("object", self._class(arguments[0], path), ("tuple", nodes))
            self.runs_code = self.runs_code or any(plain)
        elif isinstance(maker, type) and issubclass(cls, maker):
            made_by = ("call", self._class(maker, path), self.encode(tuple(arguments), path))
        elif full_name(maker) in MAKERS:
            made_by = ("call", self._code(maker, path), self.encode(tuple(arguments), path))
        else:
            return self._from_template(obj, path, f"it is made by calling {full_name(maker)}")
        return self._made(obj, path, made_by, state, items, pairs)

    def _made(self, obj: Any, path: str, made_by: tuple[Any, ...], state: Any, items: Any, pairs: Any) -> Any:
        kind, *how = made_by
        setter = getattr(type(obj), "__setstate__", None)
        is_plain = setter in (None, nn.Module.__setstate__) and type(state) in (dict, types.NoneType)
        is_plain = is_plain and (kind, items, pairs) == ("object", None, None)
        self.runs_code = self.runs_code or not (is_plain or type(obj) is OrderedDict)
        return (
            kind, self._remember(obj, path), *how, self._state(obj, state, path),
            None if items is None else self._items(items, path), None if pairs is None else self._pairs(pairs, path),
        )

    def _filled(self, obj: Any, path: str) -> Any:
        """An object that the template has, with the attributes that it has here."""
        state = {key: value for key, value in vars(obj).items() if key != CALL}
        return self._made(obj, path, ("object", self._class(type(obj), path), None), state, None, None)

    def _usual(self, module: nn.Module, class_node: Any, path: str) -> Any:
        """A module without its empty tables; these get the numbers that follow each other from ``first`` on."""
        state, memo = vars(module).copy(), self._memo
        state.pop(CALL, None)
        number, first = self._remember(module, path), len(memo)
        for key, kind in TABLES.items():
            table = state[key]
            if not table and type(table) is kind and id(table) not in memo:
                memo[id(table)] = len(memo), table, path
                del state[key]
        return ("module", number, class_node, first, self._attributes(state, path, is_module=True))

    def _class(self, cls: type, path: str) -> Any:
        """A class of which the template has the instance, if it has no name."""
        node = self._named(cls)
        if node is None:
            self._build(path, f"an instance of the class {cls.__qualname__}")
            node = ("local", cls.__qualname__)
        return node

    def _from_template(self, obj: Any, path: str, reason: str) -> Any:
        found = self._names.deep(obj)
        if found is not None:
            return self._bound(found, obj)
        name = full_name(type(obj))
        self._build(path, f"a {name} ({reason})")
        if hasattr(obj, "__dict__"):
            return self._filled(obj, path)
        return ("built", self._remember(obj, path), name)

    def _state(self, obj: Any, state: Any, path: str) -> Any:
        if type(state) is not dict:
            return self.encode(state, path)
        return ("dict", None, self._attributes(state, path, is_module=isinstance(obj, nn.Module)))

    def _attributes(self, state: dict[str, Any], path: str, *, is_module: bool) -> list[tuple[str, Any]]:
        return [
            (key, value if type(value) in ATOMS else
             self._of_module(value, key, path) if is_module and key in _INTERNAL else
             self.encode(value, f"{path}.{key}" if path else str(key)))
            for key, value in state.items()
        ]

    def _of_module(self, value: Any, key: str, path: str) -> Any:
        """One of the attributes that every module has: they belong to it."""
        if id(value) in self._memo or type(value) in ATOMS:
            return self.encode(value, path)
        if key in HOOK_TABLES:
            return self._hooks(value, key, path)
        if key in ("_parameters", "_buffers", "_modules") and type(value) is dict:
            pairs = [(name, self.encode(v, f"{path}.{name}" if path else name)) for name, v in value.items()]
            return ("dict", self._remember(value, path), pairs)
        return self._by_kind(value, path)

    def _hooks(self, table: OrderedDict[int, Any], name: str, path: str) -> Any:
        """Hooks one by one: one that can't travel stays behind and is named."""
        number, found = self._remember(table, path), []
        where = f" of {path}" if path else ""
        for key, hook in table.items():
            nodes = self.trial(hook, f"the hook {hook!r}", f"{name[1:-1]} {hook!r}{where}", may_build=True)
            found += [(key, node) for node in nodes]
        return ("hooks", number, found)


def _number(taken: Taken, obj: Any, path: str) -> int:
    known = taken.get(id(obj))
    if known is None:
        known = taken[id(obj)] = len(taken), obj, path
    return known[0]


def _can_change(obj: Any) -> bool:
    if is_a(obj, (type, types.FunctionType, types.ModuleType, logging.Logger, weakref.ref)):
        return False
    kinds = (list, dict, set, deque, bytearray, torch.Generator, *LOCKS)
    return is_a(obj, kinds) or bool(getattr(obj, "__dict__", None))
