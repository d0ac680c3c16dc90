"""From plain values and tensors to an object graph: the other side of ``encoding.py``."""

from __future__ import annotations

import importlib
import types
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.functions import contents_of
from dynpipe_ds.migration.callables import MAKERS, digest_of, full_name, named
from dynpipe_ds.migration.compiled import (
    compile_again,
    compile_in_place,
    is_compiled_function,
    is_compiled_module,
    original_of,
)
from dynpipe_ds.migration.names import Names
from dynpipe_ds.migration.references import Path, is_a, spell
from dynpipe_ds.migration.usual import TABLES


class DecodingError(RuntimeError):
    """What another rank names is not here, or is something else here."""


_ABSENT = object()

Journal = list[tuple[dict[str, Any], dict[str, Any]]]
"""Dictionaries that are changed, and what was in them."""


def note(journal: Journal, module: nn.Module) -> None:
    """Note what a module of this rank has before it is changed."""
    for changed in (module.__dict__, *(value for value in module.__dict__.values() if type(value) is dict)):
        journal.append((changed, dict(changed)))


def undo(journal: Journal) -> None:
    """Give modules back what they had."""
    for changed, before in reversed(journal):
        changed.clear()
        changed.update(before)
    journal.clear()


class Decoder:
    """Decodes what one encoder encoded.

    Args:
        tensors: by number.
        names: what this rank knows by name.
        device: this rank's.
        journal: notes modules of this rank that are changed, each with its attributes before.
    """

    def __init__(
        self, tensors: Sequence[Tensor], names: Names, device: torch.device | None = None,
        journal: Journal | None = None,
    ) -> None:
        self._journal: Journal = [] if journal is None else journal
        self._tensors = tensors
        self._names = names
        self._device = device
        self._objects: dict[int, Any] = {}
        self.bound: dict[Path, Any] = {}
        self.lost: list[str] = []
        self.twins: dict[int, Tensor] = {}

    def decode(self, node: Any, twin: Any = _ABSENT) -> Any:
        """Make what a node stands for.

        Args:
            node: from :meth:`Encoder.encode`.
            twin: what the template has at this place, if there is a template.

        Raises:
            DecodingError: naming what is missing or different here.
        """
        if type(node) is not tuple:
            return node
        kind, *fields = node
        return getattr(self, f"_make_{kind}")(twin, *fields)

    # -- kinds; each gets what the template has, and what the encoder wrote -------------------

    def _make_tensor(self, twin: Any, number: int) -> Any:
        if isinstance(twin, Tensor):
            self.twins[number] = twin
        return self._tensors[number]

    def _make_memo(self, _twin: Any, number: int) -> Any:
        return self._objects[number]

    def _make_bound(self, _twin: Any, path: Path, class_name: str) -> Any:
        try:
            obj = self._names.resolve(path)
        except LookupError as error:
            raise DecodingError(str(error)) from error
        mine = full_name(type(obj))
        if mine != class_name:
            raise DecodingError(f"{spell(path)} is a {class_name} on the stage it comes from, and a {mine} here")
        self.bound[path] = obj
        return obj

    def _make_named(self, _twin: Any, module: str, name: str) -> Any:
        try:
            obj = named(module, name)
            if obj is None:
                importlib.import_module(module)
                obj = named(module, name)
        except ImportError as error:
            raise DecodingError(f"{module}.{name} can't be imported here ({error})") from error
        if obj is None:
            raise DecodingError(f"{module} has no {name} here")
        return obj

    def _make_tuple(self, twin: Any, items: list[Any]) -> Any:
        return tuple(self.decode(item, _item(twin, i)) for i, item in enumerate(items))

    def _make_list(self, twin: Any, number: int, items: list[Any]) -> Any:
        made = self._objects[number] = twin if type(twin) is list else []
        made[:] = [self.decode(item, _item(twin, i)) for i, item in enumerate(items)]
        return made

    def _make_dict(self, twin: Any, number: int | None, pairs: list[Any]) -> Any:
        made = twin if type(twin) is dict else {}
        if number is not None:
            self._objects[number] = made
        decoded = [(key := self.decode(k), self.decode(v, _item(twin, key))) for k, v in pairs]
        made.clear()
        made.update(decoded)
        return made

    def _make_set(self, twin: Any, number: int, items: list[Any]) -> Any:
        made = self._objects[number] = twin if type(twin) is set else set()
        decoded = [self.decode(item) for item in items]
        made.clear()
        made.update(decoded)
        return made

    def _make_frozenset(self, _twin: Any, items: list[Any]) -> Any:
        return frozenset(self.decode(item) for item in items)

    def _make_object(
        self, twin: Any, number: int, cls_node: Any, arguments: Any, state: Any, items: Any, pairs: Any
    ) -> Any:
        cls = self.decode(cls_node, twin)
        if type(twin) is cls and hasattr(twin, "__dict__"):
            made = twin
        elif arguments is None:
            raise self._missing(twin, f"an instance of {cls.__qualname__}")
        else:
            positional, keywords = self.decode(arguments)
            made = cls.__new__(cls, *positional, **keywords)
        return self._fill(made, twin, number, state, items, pairs, arguments is None)

    def _make_module(self, twin: Any, number: int, cls_node: Any, first: int, pairs: list[Any]) -> Any:
        cls = self.decode(cls_node, twin)
        made = self._objects[number] = twin if type(twin) is cls else cls.__new__(cls)
        theirs = dict(vars(made))
        state: dict[str, Any] = {}
        named = dict(pairs)
        for key, kind in TABLES.items():
            if key not in named:
                mine = theirs.get(key)
                # Who knows the template may hold its tables of parts, too; hooks are never its own.
                table: Any = mine if type(mine) is kind and kind is not OrderedDict else kind()
                table.clear()
                self._objects[first + len(state)] = table
                state[key] = table
        state.update({key: self.decode(node, theirs.get(key, _ABSENT)) for key, node in pairs})
        vars(made).clear()
        vars(made).update(state)
        return made

    def _make_part(self, twin: Any, path: Path, node: Any) -> Any:
        """A module that is a part of this rank's arguments, too: it stays the same object, which the script knows."""
        try:
            mine = self._names.resolve(path)
        except LookupError:
            mine = _ABSENT
        if node[0] not in ("object", "module", "compiled_module") or not isinstance(mine, nn.Module):
            return self.decode(node, twin)
        if not self._names.claim(mine):  # a tied layer's twin has it, and the two have weights of their own
            return self.decode(node)
        if node[0] == "compiled_module":
            return self.decode(node, mine)
        if self.decode(node[2], mine) is not type(mine):
            here = type(mine).__qualname__
            self.lost.append(f"{spell(path)} is a {here} here, so it is not the layer's own any more")
            return self.decode(node, twin)
        note(self._journal, mine)
        return self.decode(node, mine)

    def _make_call(
        self, twin: Any, number: int, maker_node: Any, arguments: Any, state: Any, items: Any, pairs: Any
    ) -> Any:
        maker = self.decode(maker_node, twin)
        if not isinstance(maker, type) and full_name(maker) not in MAKERS:
            raise DecodingError(f"{maker!r} is not among what may be called to make an object")
        made = maker(*self.decode(arguments))
        return self._fill(made, twin, number, state, items, pairs, False)

    def _make_compiled(self, twin: Any, number: int, recipe: Any, original: Any) -> Any:
        theirs = original_of(twin) if is_compiled_function(twin) else _ABSENT
        made = self._objects[number] = compile_again(self.decode(original, theirs), self.decode(recipe))
        return made

    def _make_compiled_module(self, twin: Any, number: int, recipe: Any, original: Any, own: list[Any]) -> Any:
        theirs = original_of(twin) if is_compiled_module(twin) else _ABSENT
        arrived, arguments = self.decode(original, theirs), self.decode(recipe)
        # The script's own wrapper stays the same object, as the module in it does.
        made = twin if theirs is not _ABSENT and theirs is arrived else compile_again(arrived, arguments)
        self._objects[number] = made
        note(self._journal, made)
        vars(made).update({key: self.decode(value, vars(made).get(key, _ABSENT)) for key, value in own})
        return made

    def _make_compiled_call(self, twin: Any, recipe: Any, node: Any) -> Any:
        made = self.decode(node, twin)
        compile_in_place(made, self.decode(recipe))
        return made

    def _make_local(self, twin: Any, name: str) -> Any:
        if type(twin).__qualname__ != name:
            raise self._missing(twin, f"an instance of {name}")
        return type(twin)

    def _fill(self, made: Any, twin: Any, number: int, state: Any, items: Any, pairs: Any, is_raw: bool) -> Any:
        self._objects[number] = made
        if state is not None:
            _set_state(made, self._state(state, twin if made is twin else _ABSENT), is_raw)
        if made is twin and (items is not None or pairs is not None):
            made.clear()
        if items is not None:
            made.extend(self.decode(item) for item in items)
        for key, value in pairs or ():
            made[self.decode(key)] = self.decode(value)
        return made

    def _state(self, node: Any, twin: Any) -> Any:
        if node[0] == "dict" and node[1] is None:
            theirs = getattr(twin, "__dict__", {})
            return {key: self.decode(value, theirs.get(key, _ABSENT)) for key, value in node[2]}
        return self.decode(node)

    def _make_function(
        self, twin: Any, number: int, name: str, digest: str, cells: list[Any], defaults: Any, keywords: Any
    ) -> Any:
        if not (is_a(twin, types.FunctionType) and twin.__qualname__ == name and digest_of(twin.__code__) == digest):
            raise self._missing(twin, f"the function {name}")
        self._objects[number] = twin
        for cell, nodes in zip(twin.__closure__ or (), cells, strict=True):
            for node in nodes:
                cell.cell_contents = self.decode(node, *contents_of(cell))
        twin.__defaults__ = self.decode(defaults, twin.__defaults__)
        twin.__kwdefaults__ = self.decode(keywords, twin.__kwdefaults__)
        return twin

    def _make_built(self, twin: Any, number: int, name: str) -> Any:
        found = getattr(twin, "__qualname__", f"{type(twin).__module__}.{type(twin).__qualname__}")
        if twin is _ABSENT or found != name:
            raise self._missing(twin, name)
        self._objects[number] = twin
        return twin

    def _missing(self, twin: Any, what: str) -> DecodingError:
        found = "nothing" if twin is _ABSENT else f"a {type(twin).__qualname__}"
        return DecodingError(f"the layer that its LayerSpec builds here has {found} in the place of {what}")

    def _make_method(self, _twin: Any, owner: Any, name: str) -> Any:
        return getattr(self.decode(owner), name)

    def _make_bind(self, twin: Any, function: Any, owner: Any) -> Any:
        return types.MethodType(self.decode(function, getattr(twin, "__func__", _ABSENT)), self.decode(owner))

    def _make_generator(self, _twin: Any, number: int, kind: str, state: int) -> Any:
        device = self._device if self._device is not None and self._device.type == kind else torch.device(kind)
        made = self._objects[number] = torch.Generator(device)
        made.set_state(self._tensors[state])
        return made

    def _make_own_device(self, _twin: Any) -> Any:
        return self._device

    def _make_hooks(self, twin: Any, number: int, pairs: list[Any]) -> Any:
        made: OrderedDict[int, Any] = OrderedDict()
        self._objects[number] = made
        candidates = list(twin.values()) if isinstance(twin, dict) else []
        for key, node in pairs:
            try:
                made[key] = self.hook(node, candidates)
            except DecodingError as error:
                self.lost.append(f"a hook can't be carried and stays behind ({error})")
        return made

    def hook(self, node: Any, candidates: list[Any]) -> Any:
        """Decode a hook; one without a name is among those that the template has at this place.

        Args:
            node: of the hook.
            candidates: those of the template; the one that is used is taken out.

        Raises:
            DecodingError: if none of them is the one.
        """
        failure: DecodingError | None = None
        for i, candidate in enumerate(candidates):
            try:
                found = self.decode(node, candidate)
            except DecodingError as error:
                failure = error
                continue
            if found is candidate:
                del candidates[i]
            return found
        if failure is not None and not candidates:
            raise failure
        return self.decode(node)


def _set_state(made: Any, state: Any, is_raw: bool) -> None:
    """Give an object its attributes, as ``copy`` and ``pickle`` do; raw ones are all that it has."""
    if hasattr(made, "__dict__") and type(state) is dict:
        vars(made).clear()
    if hasattr(made, "__setstate__") and not is_raw:
        made.__setstate__(state)
        return
    attributes, slots = state if type(state) is tuple else (state, None)
    vars(made).update(attributes or {})
    for name, value in (slots or {}).items():
        setattr(made, name, value)


def _item(twin: Any, key: Any) -> Any:
    """What a container of the template has at a place."""
    if twin is _ABSENT:
        return _ABSENT
    try:
        return twin[key] if isinstance(twin, (list, tuple, dict)) else _ABSENT
    except (LookupError, TypeError):
        return _ABSENT
