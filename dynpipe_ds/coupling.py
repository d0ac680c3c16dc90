"""Layers that hand something to a later layer or to the loss besides their output, where a cut would lose it.

An auxiliary loss that a function layer stashes on the module for ``loss_fn`` is the usual case. Stages are processes
of their own, so what is stashed on one never reaches another, and DeepSpeed trains on without it. Found by reading
byte code: a layer sets an attribute of an object, or changes a container, that a later reader looks at. What goes
through ``setattr``, another name or a call into other code is not seen.
"""

from __future__ import annotations

import dis
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from dynpipe_ds.functions import contents_of, nested_codes
from dynpipe_ds.host.specs import forward_function, is_buildable

_CONTAINERS = (dict, list, set, deque)
_MUTATORS = frozenset({"append", "appendleft", "extend", "insert", "add", "update", "setdefault"})
_ATTRIBUTE = ("LOAD_ATTR", "LOAD_METHOD")

Place = tuple[int, str]  # id of an object, and a name on it; "" for the items of a container


@dataclass(frozen=True)
class Coupling:
    """A layer and the last reader of something it leaves behind.

    Attributes:
        writer: index of the layer.
        reader: index of the last layer that must be on its stage.
        what: for messages, for example ``"layer 7 (add_loss) sets moe_loss, which loss_fn reads"``.
    """

    writer: int
    reader: int
    what: str

    def cuts(self) -> range:
        """Positions where a cut would separate the two."""
        return range(self.writer + 1, self.reader + 1)


@dataclass
class _Access:
    sets: set[Place] = field(default_factory=set)
    reads: set[Place] = field(default_factory=set)


@dataclass(frozen=True)
class _Variables:
    """What a function's names stand for before it runs."""

    of_module: Mapping[str, Any]
    arguments: Mapping[str, Any]  # the bound ones
    cells: Mapping[str, Any]

    def loaded(self, step: dis.Instruction, outermost: bool) -> Any:
        """The object that an instruction loads by name, ``None`` if that can't be known."""
        if "LOAD_" not in step.opname or step.opname in (*_ATTRIBUTE, "LOAD_CONST"):
            return None
        name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        if "GLOBAL" in step.opname:
            return self.of_module.get(name)
        if "FAST" in step.opname:  # a local name; those of inner functions are their own
            return self.arguments.get(name) if outermost else None
        return self.cells.get(name)


def find_couplings(
    layers: Sequence[Any], names: Sequence[str], readers: Sequence[Callable[..., Any]]
) -> list[Coupling]:
    """Couplings of function layers and of tied layers' ``forward_fn``; the same on every rank.

    Args:
        layers: the layer list; what is neither a function nor tied does not count.
        names: of the layers, for messages.
        readers: what runs after the last layer: ``loss_fn``, ``get_additional_losses``.
    """
    last = len(layers) - 1
    accesses = [(i, f"layer {i} ({names[i]})", _access(_function_of(layer))) for i, layer in enumerate(layers)]
    later = [(last, _name(reader), _access(reader)) for reader in readers]
    found = []
    for writer, writer_name, writing in accesses:
        for reader, reader_name, reading in (*later, *reversed(accesses[writer + 1 :])):
            common = sorted(name for _, name in writing.sets & reading.reads)
            if common and reader > writer:
                value = common[0] or "an item of a shared container"
                found.append(Coupling(writer, reader, f"{writer_name} sets {value}, which {reader_name} reads"))
                break
    return found


def _function_of(layer: Any) -> Any:
    return forward_function(layer) if is_buildable(layer) or isinstance(layer, nn.Module) else layer


def _access(function: Any) -> _Access:
    access = _Access()
    for part, bound in _parts(function):
        known = _variables(part, bound)
        for code in nested_codes(part.__code__):
            steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
            _read_code(steps, known, code is part.__code__, access)
    return access


def _read_code(steps: list[dis.Instruction], known: _Variables, outermost: bool, access: _Access) -> None:
    def place(k: int) -> Place | None:
        """What the expression that ends with step ``k`` denotes: a container, or an attribute of an object."""
        step = steps[k]
        if step.opname in _ATTRIBUTE:
            owner = known.loaded(steps[k - 1], outermost) if k else None
            return None if owner is None else (id(owner), step.argval)
        container = known.loaded(step, outermost)
        return (id(container), "") if isinstance(container, _CONTAINERS) else None

    for k, step in enumerate(steps):
        if step.opname == "STORE_ATTR" and k:
            owner = known.loaded(steps[k - 1], outermost)
            target = None if owner is None else (id(owner), step.argval)
        elif step.opname == "STORE_SUBSCR" and k > 1:
            target = place(k - 2)
        elif step.opname in _ATTRIBUTE and step.argval in _MUTATORS and k:
            target = place(k - 1)
        else:
            target = None
            if not _is_target(steps, k) and (read := place(k)) is not None:
                access.reads.add(read)
        if target is not None:
            access.sets.add(target)


def _is_target(steps: list[dis.Instruction], k: int) -> bool:
    """Whether the expression that ends here is only being changed, not looked at."""
    rest = steps[k + 1 : k + 3]
    changes = bool(rest) and rest[0].opname in _ATTRIBUTE and rest[0].argval in _MUTATORS
    return changes or (len(rest) == 2 and rest[1].opname == "STORE_SUBSCR")


def _variables(function: types.FunctionType, bound: Sequence[Any]) -> _Variables:
    code, cells = function.__code__, function.__closure__ or ()
    arguments = dict(zip(code.co_varnames, bound, strict=False))
    named = zip(code.co_freevars, cells, strict=True)
    closed = {name: value for name, cell in named for value in contents_of(cell)}
    return _Variables(function.__globals__, arguments, {**arguments, **closed})


def _parts(function: Any, bound: tuple[Any, ...] = ()) -> Iterator[tuple[types.FunctionType, tuple[Any, ...]]]:
    """The Python function that a callable runs, with its bound positional arguments."""
    if isinstance(function, partial):
        yield from _parts(function.func, (*function.args, *bound))
    elif isinstance(function, types.MethodType):
        yield from _parts(function.__func__, (function.__self__, *bound))
    elif isinstance(function, types.FunctionType):
        yield function, bound
    elif function is not None and not isinstance(function, type):
        run = getattr(type(function), "forward" if isinstance(function, nn.Module) else "__call__", None)
        if isinstance(run, types.FunctionType):
            yield run, (function, *bound)


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def coupled_cuts(couplings: Iterable[Coupling], boundaries: Sequence[int]) -> set[int]:
    """Cuts that would keep a value from reaching its reader.

    Raises:
        ValueError: if the first partition has one of these cuts.
    """
    coupled: set[int] = set()
    for coupling in couplings:
        separating = sorted(set(coupling.cuts()) & set(boundaries[1:-1]))
        if separating:
            raise ValueError(
                f"the partition {tuple(boundaries)} cuts at {separating[0]}, but {coupling.what}, and the value would "
                f"not reach another stage; choose a first partition without a cut at {[*coupling.cuts()]}, or "
                "pass the value on in what the layers return"
            )
        coupled |= set(coupling.cuts())
    return coupled
