"""An object graph as plain values and tensors: what a layer owns by value, what it refers to by name.

Encoded values are atoms and tuples that begin with a tag (:class:`Tag`). No code is among them: classes and functions
are named, and what is made anew without a name (a lambda, a class inside a function) is taken from the layer that the
receiver builds from the same ``LayerSpec``, its *template*, and filled with what the sender's holds.
"""

from __future__ import annotations

import copyreg
import enum
import hashlib
import logging
import sys
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.migration.names import ATOMS, Names, Path, is_a

HOOK_TABLES = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

LOCKS: dict[type, Any] = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}
"""A lock that a layer owns is a new one on the other side, since nobody there holds it."""

# By ``__reduce__``: what else than classes may be called to make an object anew. They make data, and run no code.
MAKERS = frozenset({
    "copyreg._reconstructor", "builtins.iter", "re._compile", "collections.OrderedDict",
    "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar",
    "numpy._core.numeric._frombuffer", "numpy.core.numeric._frombuffer",
    "numpy.random._pickle.__generator_ctor", "numpy.random._pickle.__bit_generator_ctor",
    "numpy.random._pickle.__randomstate_ctor",
    "torch._utils._rebuild_sparse_tensor",
})


_NEW, _NEW_EX = copyreg.__newobj__, copyreg.__newobj_ex__  # type: ignore[attr-defined]
_INTERNAL = frozenset(vars(nn.Module()))
_WITHOUT_FORM = (types.GeneratorType, types.CoroutineType, torch.jit.ScriptModule, torch.jit.ScriptFunction)


class Tag:
    """What an encoded value is."""

    TENSOR = 0  # number
    MEMO = 1  # number of an object that came before
    BOUND = 2  # path, class
    NAMED = 3  # module, qualified name
    MODULE = 4  # name
    TUPLE = 5  # items
    LIST = 6  # number, items
    DICT = 7  # number, pairs
    SET = 8  # number, items
    FROZENSET = 9  # items
    OBJECT = 10  # number, class, (arguments, keywords) of its __new__, state, items, pairs
    CALL = 11  # number, class or function, arguments, state, items, pairs
    FUNCTION = 12  # number, qualified name, digest, cells, defaults, keyword defaults
    BUILT = 13  # number, class or qualified name
    METHOD = 14  # object, name
    BIND = 15  # function, object
    LOCK = 16  # number, whether it is a plain one
    GENERATOR = 17  # number, kind of device, state
    WEAK = 18  # object
    DEVICE = 19
    HOOKS = 20  # number, pairs
    LOGGER = 21  # name
    LOCAL = 22  # qualified name of a class
    PART = 23  # path, object


class CantCarryError(TypeError):
    """A value that has no form in which it could travel.

    Args:
        what: it is, and why not.
        path: where it was found.
    """

    def __init__(self, what: str, path: str = "") -> None:
        super().__init__(f"{path or 'it'} holds {what}")


class Tensors:
    """The tensors that were taken out of what is encoded, each once."""

    def __init__(self) -> None:
        self.sources: list[Tensor] = []
        self.where: list[str] = []
        self._index: dict[int, int] = {}

    def number(self, tensor: Tensor, path: str) -> int:
        """The tensor's number.

        Args:
            tensor: the tensor.
            path: where it was found.
        """
        number = self._index.setdefault(id(tensor), len(self.sources))
        if number == len(self.sources):
            self.sources.append(tensor)  # keeps the id alive
            self.where.append(path)
        return number

    def forget(self, count: int) -> None:
        """Drop those that came after the first ``count``.

        Args:
            count: how many stay.
        """
        for source in self.sources[count:]:
            del self._index[id(source)]
        del self.sources[count:], self.where[count:]


def digest_of(code: types.CodeType) -> str:
    """Tells one function's code from another's.

    Args:
        code: of the function.
    """
    names = (code.co_code, code.co_names, code.co_freevars, code.co_varnames)
    return hashlib.blake2b(repr(names).encode(), digest_size=8).hexdigest()


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
    """

    def __init__(
        self, tensors: Tensors, names: Names, device: torch.device | None = None, own: Iterable[int] = (), *,
        may_build: bool = False,
    ) -> None:
        self._tensors = tensors
        self._names = names
        self._device = device
        self._own = frozenset(own)
        self._memo: dict[int, tuple[int, Any, str]] = {}  # the object keeps its id alive
        self.bound: dict[Path, Any] = {}
        self._may_build = may_build
        self.built: list[str] = []
        self.built_hooks: list[str] = []
        self.lost: list[str] = []

    def encode(self, obj: Any, path: str = "") -> Any:
        """Encode a value.

        Args:
            obj: the value.
            path: where it is, for messages.

        Returns:
            Plain values.

        Raises:
            CantCarryError: naming what can't travel, and where.
        """
        if type(obj) in ATOMS:
            return obj
        known = self._memo.get(id(obj))
        if known is not None:
            return (Tag.MEMO, known[0])
        if is_a(obj, Tensor) and obj.layout == torch.strided:
            return self._tensor(obj, path)
        found = self._names.of(obj)
        if found is not None:
            return self._bound(found, obj)
        return self._by_kind(obj, path)

    def trial(self, obj: Any, path: str, *, may_build: bool) -> Any:
        """Encode a value without which its layer can move.

        Args:
            obj: the value.
            path: where it is.
            may_build: whether the template may have it.

        Returns:
            Plain values, or the error that says why not; nothing is left of the attempt then.
        """
        marks = len(self._memo), len(self._tensors.sources), len(self.bound), len(self.built)
        before, self._may_build = self._may_build, self._may_build and may_build
        try:
            node = self.encode(obj, path)
            self.built_hooks += self.built[marks[3]:]
            return node
        except CantCarryError as error:
            self._tensors.forget(marks[1])
            for table, mark in ((self._memo, marks[0]), (self.bound, marks[2])):
                while len(table) > mark:
                    table.popitem()
            return error
        finally:
            del self.built[marks[3]:]
            self._may_build = before

    def _build(self, path: str, what: str) -> None:
        """Note what only the template has."""
        if not self._may_build:
            raise CantCarryError(f"{what}, which has no name outside of this process", path)
        self.built.append(f"{path} ({what})")

    def unnamed(self) -> list[tuple[Any, str]]:
        """What went by value and can change, and where it was."""
        values = [(obj, path) for _, obj, path in self._memo.values() if _can_change(obj)]
        return [*values, *zip(self._tensors.sources, self._tensors.where, strict=True)]

    # -- kinds --------------------------------------------------------------------------------

    def _remember(self, obj: Any, path: str) -> int:
        number = len(self._memo)
        self._memo[id(obj)] = (number, obj, path)
        return number

    def _bound(self, found: Path, obj: Any) -> Any:
        self.bound.setdefault(found, obj)
        return (Tag.BOUND, found, _class_name(type(obj)))

    def _tensor(self, tensor: Tensor, path: str) -> Any:
        if id(tensor) not in self._own:
            found = self._names.of(tensor)
            if found is not None:
                return self._bound(found, tensor)
        if type(tensor) not in (Tensor, nn.Parameter):
            raise CantCarryError(
                f"a tensor of class {_class_name(type(tensor))}, which is more than its numbers", path
            )
        return (Tag.TENSOR, self._tensors.number(tensor, path))

    def _by_kind(self, obj: Any, path: str) -> Any:
        cls = type(obj)
        if cls is tuple:
            return (Tag.TUPLE, [self.encode(value, f"{path}[{i}]") for i, value in enumerate(obj)])
        if cls is list:
            number = self._remember(obj, path)
            return (Tag.LIST, number, [self.encode(value, f"{path}[{i}]") for i, value in enumerate(obj)])
        if cls is dict:
            return (Tag.DICT, self._remember(obj, path), self._pairs(obj.items(), path))
        if cls is set:
            return (Tag.SET, self._remember(obj, path), [self.encode(value, path) for value in obj])
        if cls is frozenset:
            return (Tag.FROZENSET, [self.encode(value, path) for value in obj])
        if is_a(obj, (type, types.FunctionType, types.BuiltinFunctionType)):
            return self._code(obj, path)
        if cls is types.MethodType:
            return self._method(obj, path)
        if is_a(obj, (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)):
            return (Tag.METHOD, self._code(obj.__objclass__, path), obj.__name__)
        if is_a(obj, enum.Enum):
            return (Tag.METHOD, self._class(cls, path), obj.name)
        if cls is types.ModuleType or is_a(obj, types.ModuleType):
            return (Tag.MODULE, obj.__name__)
        if cls in LOCKS:
            return (Tag.LOCK, self._remember(obj, path), cls is type(threading.Lock()))
        if is_a(obj, logging.Logger):
            return (Tag.LOGGER, obj.name)
        if cls is weakref.ref and obj() is not None:
            return (Tag.WEAK, self.encode(obj(), path))
        if cls is torch.Generator:
            state = (obj.device.type, self._tensors.number(obj.get_state(), path))
            return (Tag.GENERATOR, self._remember(obj, path), *state)
        if cls is torch.device and obj == self._device:
            return (Tag.DEVICE,)
        if cls in (torch.dtype, torch.layout, torch.memory_format):
            return (Tag.NAMED, "torch", str(obj).removeprefix("torch."))
        return self._object(obj, path)

    def _method(self, method: types.MethodType, path: str) -> Any:
        owner, function = self.encode(method.__self__, f"{path}.__self__"), method.__func__
        if getattr(type(method.__self__), function.__name__, None) is function:
            return (Tag.METHOD, owner, function.__name__)
        return (Tag.BIND, self.encode(function, path), owner)

    def _pairs(self, items: Iterable[tuple[Any, Any]], path: str) -> list[tuple[Any, Any]]:
        return [(self.encode(k, f"a key of {path}"), self.encode(v, f"{path}[{k!r}]")) for k, v in items]

    def _code(self, obj: Any, path: str) -> Any:
        """A class or function: by its own name, by a path, or from the template."""
        owner = getattr(obj, "__self__", None)
        if isinstance(obj, types.BuiltinFunctionType) and not is_a(owner, (types.NoneType, types.ModuleType, type)):
            return (Tag.METHOD, self.encode(owner, f"{path}.__self__"), obj.__name__)
        module, name = getattr(obj, "__module__", None) or getattr(owner, "__name__", ""), obj.__qualname__
        if named(str(module), name) is obj:
            return (Tag.NAMED, module, name)
        found = self._names.local(obj)
        if found is not None:
            return (Tag.BOUND, found, _class_name(type(obj)))
        if isinstance(obj, types.BuiltinFunctionType):
            simple = str(obj.__name__)
            for holder_name, holder in sys.modules.copy().items():
                if is_a(holder, types.ModuleType) and vars(holder).get(simple) is obj:
                    return (Tag.NAMED, holder_name, simple)
        self._build(path, f"the {'function' if callable(obj) and not isinstance(obj, type) else 'class'} {name}")
        if isinstance(obj, types.FunctionType):
            number = self._remember(obj, path)
            cells = [self._cell(cell, f"{path} (variable {variable})")
                     for cell, variable in zip(obj.__closure__ or (), obj.__code__.co_freevars, strict=True)]
            return (Tag.FUNCTION, number, name, digest_of(obj.__code__), cells,
                    self.encode(obj.__defaults__, path), self.encode(obj.__kwdefaults__, path))
        return (Tag.BUILT, self._remember(obj, path), name)

    def _cell(self, cell: types.CellType, path: str) -> Any:
        try:
            value = cell.cell_contents
        except ValueError:  # a variable without a value
            return None
        return (self.encode(value, path),)

    def _object(self, obj: Any, path: str) -> Any:
        found = self._names.part(obj) if isinstance(obj, nn.Module) else None
        node = self._made_anew(obj, path)
        return node if found is None else (Tag.PART, found, node)

    def _made_anew(self, obj: Any, path: str) -> Any:
        cls = type(obj)
        if is_a(obj, _WITHOUT_FORM):
            raise CantCarryError(f"a {_class_name(cls)}, whose state can't be read", path)
        if isinstance(obj, nn.Module) and not self._has_name(cls):  # parametrized ones refuse to be pickled
            return self._filled(obj, path)
        try:
            reduced = obj.__reduce_ex__(4)
        except Exception as error:  # noqa: BLE001 - whatever a class raises, it says no
            return self._from_template(obj, path, str(error))
        if isinstance(reduced, str):  # the name of a global
            module = cls.__module__ if named(cls.__module__, reduced) is obj else str(getattr(obj, "__module__", ""))
            if named(module, reduced) is obj:
                return (Tag.NAMED, module, reduced)
            return self._from_template(obj, path, f"it calls itself {reduced}, which is something else")
        maker, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
        if maker is _NEW or maker is _NEW_EX:
            plain = (arguments[1], arguments[2]) if maker is _NEW_EX else (arguments[1:], {})
            tag, made_by = Tag.OBJECT, (self._class(arguments[0], path), self.encode(plain, path))
        elif isinstance(maker, type) and issubclass(cls, maker):
            tag, made_by = Tag.CALL, (self._class(maker, path), self.encode(tuple(arguments), path))
        elif _full_name(maker) in MAKERS:
            tag, made_by = Tag.CALL, (self._code(maker, path), self.encode(tuple(arguments), path))
        else:
            return self._from_template(obj, path, f"it is made by calling {_full_name(maker)}")
        return self._made(obj, path, (tag, *made_by), state, items, pairs)

    def _made(self, obj: Any, path: str, made_by: tuple[Any, ...], state: Any, items: Any, pairs: Any) -> Any:
        tag, *how = made_by
        number = self._remember(obj, path)
        return (
            tag, number, *how, self._state(obj, state, path),
            None if items is None else [self.encode(value, f"{path}[{i}]") for i, value in enumerate(items)],
            None if pairs is None else self._pairs(pairs, path),
        )

    def _filled(self, obj: Any, path: str) -> Any:
        """An object that the template has, with the attributes that it has here."""
        return self._made(obj, path, (Tag.OBJECT, self._class(type(obj), path), None), vars(obj), None, None)

    def _has_name(self, cls: type) -> bool:
        return named(cls.__module__, cls.__qualname__) is cls or self._names.local(cls) is not None

    def _class(self, cls: type, path: str) -> Any:
        """A class of which the template has the instance, if it has no name."""
        if named(cls.__module__, cls.__qualname__) is cls:
            return (Tag.NAMED, cls.__module__, cls.__qualname__)
        found = self._names.local(cls)
        if found is not None:
            return (Tag.BOUND, found, _class_name(type(cls)))
        self._build(path, f"an instance of the class {cls.__qualname__}")
        return (Tag.LOCAL, cls.__qualname__)

    def _from_template(self, obj: Any, path: str, reason: str) -> Any:
        found = self._names.deep(obj)
        if found is not None:
            return self._bound(found, obj)
        name = _class_name(type(obj))
        self._build(path, f"a {name} ({reason})")
        if hasattr(obj, "__dict__"):
            return self._filled(obj, path)
        return (Tag.BUILT, self._remember(obj, path), name)

    def _state(self, obj: Any, state: Any, path: str) -> Any:
        if type(state) is not dict:
            return self.encode(state, path)
        is_module = isinstance(obj, nn.Module)
        return (Tag.DICT, None, [
            (key, self._of_module(value, key, path) if is_module and key in _INTERNAL else
             self.encode(value, f"{path}.{key}" if path else str(key)))
            for key, value in state.items()
        ])

    def _of_module(self, value: Any, key: str, path: str) -> Any:
        """One of the attributes that every module has: they belong to it."""
        if id(value) in self._memo or type(value) in ATOMS:
            return self.encode(value, path)
        if key in HOOK_TABLES:
            return self._hooks(value, key, path)
        if key in ("_parameters", "_buffers", "_modules") and type(value) is dict:
            pairs = [(name, self.encode(v, f"{path}.{name}" if path else name)) for name, v in value.items()]
            return (Tag.DICT, self._remember(value, path), pairs)
        return self._by_kind(value, path)

    def _hooks(self, table: OrderedDict[int, Any], name: str, path: str) -> Any:
        """Hooks one by one: one that can't travel stays behind and is named."""
        number, found = self._remember(table, path), []
        for key, hook in table.items():
            node = self.trial(hook, f"the hook {hook!r}", may_build=True)
            if isinstance(node, CantCarryError):
                self.lost.append(f"{name[1:-1]} {hook!r}{f' of {path}' if path else ''} can't be carried and stays "
                                 f"behind ({node})")
            else:
                found.append((key, node))
        return (Tag.HOOKS, number, found)


def _can_change(obj: Any) -> bool:
    if is_a(obj, (type, types.FunctionType)):
        return False
    kinds = (list, dict, set, deque, bytearray, torch.Generator, *LOCKS)
    return is_a(obj, kinds) or bool(getattr(obj, "__dict__", None))


def named(module: str, qualname: str) -> Any:
    """What a module calls by a name; ``None`` if nothing.

    Args:
        module: its full name.
        qualname: the name in it, with dots.
    """
    obj: Any = sys.modules.get(module)
    for part in qualname.split("."):
        obj = getattr(obj, part, None)
    return obj


def _full_name(obj: Any) -> str:
    return f"{getattr(obj, '__module__', '')}.{getattr(obj, '__qualname__', obj)}"


def _class_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
