"""Which values can cross the boundary between two stages: tensors, and plain values and containers around them.

A value is taken apart into its distinct tensors and a structure, which says where they belong. A structure consists of
None, texts and numbers in tuples, so that it can be compared, told to another stage as JSON, and put together there
without running anything that was received. What is of another kind can't cross, and is named by :class:`CantCross`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.host import accelerator

Structure = int | str | None | tuple["Structure", ...]
"""``None`` for None, the number of a tensor, or a tuple of a kind and what is in it, texts or structures."""

_DEEPEST = 32  # a container that holds itself is deeper than any
_TENSORS = (Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (Tensor, nn.Parameter)
_DTYPES = frozenset(
    getattr(torch, name)
    for name in (
        "float32", "float64", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool",
        "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
    )
    if hasattr(torch, name)
)  # fmt: skip


def _complex(real: str, imaginary: str) -> complex:
    return complex(float.fromhex(real), float.fromhex(imaginary))


# Kinds of plain values by type: a name, what one is as text, and back. As text a NaN equals itself; 0.0 is not -0.0.
_PLAIN: dict[type, tuple[str, Callable[[Any], tuple[str, ...]], Callable[..., Any]]] = {
    bool: ("bool", lambda value: ("1",) if value else (), lambda *text: bool(text)),
    int: ("int", lambda value: (hex(value),), lambda text: int(text, 16)),
    float: ("float", lambda value: (value.hex(),), float.fromhex),
    complex: ("complex", lambda value: (value.real.hex(), value.imag.hex()), _complex),
    str: ("str", lambda value: (value,), str),
    torch.dtype: ("dtype", lambda value: (dtype_name(value),), lambda name: dtype_of(name)),
    torch.Size: ("Size", lambda value: tuple(map(hex, value)), lambda *sizes: torch.Size(int(s, 16) for s in sizes)),
}
_FROM_TEXT = {name: from_text for name, _, from_text in _PLAIN.values()}
_SEQUENCES: dict[str, type] = {"tuple": tuple, "list": list}
_MAPPINGS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict}
_CONTAINERS = {kind: name for name, kind in {**_SEQUENCES, **_MAPPINGS}.items()}
_NAMED = "named"


class CantCross(Exception):
    """A value holds something that can't be sent to another stage.

    Args:
        what: it is, for messages, for example ``"a set"``.
        place: where in the value, for example ``"[1]['cache']"``; empty if it is the value itself.
    """

    def __init__(self, what: str, place: str = "") -> None:
        self.what, self.place = what, place
        super().__init__(f"{what} (at {place})" if place else what)


def take_apart(value: Any) -> tuple[Structure, list[Tensor]]:
    """A value's structure and distinct tensors, in order.

    Raises:
        CantCross: if something in it can't be sent.
    """
    numbers: dict[int, int] = {}
    tensors: list[Tensor] = []
    return _structure(value, numbers, tensors, 0), tensors


def put_together(structure: Structure, tensors: Sequence[Tensor]) -> Any:
    """A value like the one that was taken apart; its containers are new.

    Raises:
        LookupError: if this process knows no named tuple of a name in it.
    """
    if structure is None:
        return None
    if isinstance(structure, int):
        return tensors[structure]
    assert isinstance(structure, tuple)
    kind, *parts = structure
    if kind in _FROM_TEXT:
        return _FROM_TEXT[str(kind)](*parts)
    items = iter(parts)
    class_name = next(items) if kind == _NAMED else ""
    values = [put_together(part, tensors) for part in items]
    if kind == _NAMED:
        return _new_named(_class_of(str(class_name)), values)
    if kind in _SEQUENCES:
        return _SEQUENCES[str(kind)](values)
    return _MAPPINGS[str(kind)](zip(values[::2], values[1::2], strict=True))


def obstacle(value: Any) -> str | None:
    """What keeps a value from crossing, ``None`` if it can cross."""
    try:
        take_apart(value)
    except CantCross as error:
        return str(error)
    return None


def holds_plain_values(structure: Structure) -> bool:
    """Whether there is anything that may change without a change of kind: numbers, texts and the like."""
    if not isinstance(structure, tuple):
        return False
    return structure[0] in _FROM_TEXT or any(map(holds_plain_values, structure[1:]))


def shown(structure: Structure) -> str:
    """A structure in words, for messages."""
    if structure is None:
        return "None"
    if isinstance(structure, int):
        return f"tensor {structure}"
    assert isinstance(structure, tuple)
    kind, *parts = structure
    if kind in _FROM_TEXT:
        return repr(put_together(structure, ()))
    if kind in _MAPPINGS:
        texts = list(map(shown, parts))
        inside = ", ".join(f"{key}: {item}" for key, item in zip(texts[::2], texts[1::2], strict=True))
        return f"{{{inside}}}"
    name, parts = (str(parts[0]).rpartition(":")[2], parts[1:]) if kind == _NAMED else ("", parts)
    begin, end = "[]" if kind == "list" else "()"
    return f"{name}{begin}{', '.join(map(shown, parts))}{end}"


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of a value, those that it holds twice twice; nothing of objects that can't cross."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for item in value for tensor in ([item] if isinstance(item, Tensor) else tensors_in(item))]


def dtype_name(dtype: torch.dtype) -> str:
    """For example ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """What :func:`dtype_name` named."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _structure(value: Any, numbers: dict[int, int], tensors: list[Tensor], depth: int) -> Structure:
    if isinstance(value, Tensor):
        number = numbers.setdefault(id(value), len(tensors))
        if number == len(tensors):
            _check_tensor(value)
            tensors.append(value)
        return number
    if value is None:
        return None
    kind = type(value)
    if kind in _PLAIN:
        name, to_text, _ = _PLAIN[kind]
        return name, *to_text(value)
    if depth == _DEEPEST:
        raise CantCross(f"a container in more than {_DEEPEST} others")
    if kind in _MAPPINGS.values():
        return _CONTAINERS[kind], *_mapping(value, numbers, tensors, depth + 1)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind], *_items(enumerate(value), numbers, tensors, depth + 1)
    if isinstance(value, tuple) and _is_named_tuple(kind):
        return _NAMED, _class_name(kind), *_items(enumerate(value), numbers, tensors, depth + 1)
    raise CantCross(f"a value of type {_type_name(kind)}")


def _items(
    items: Iterable[tuple[Any, Any]], numbers: dict[int, int], tensors: list[Tensor], depth: int
) -> list[Structure]:
    found = []
    for key, item in items:
        try:
            found.append(_structure(item, numbers, tensors, depth))
        except CantCross as error:
            raise CantCross(error.what, f"[{key!r}]{error.place}") from None
    return found


def _mapping(value: dict[Any, Any], numbers: dict[int, int], tensors: list[Tensor], depth: int) -> list[Structure]:
    both: list[Structure] = []
    for key, structure in zip(value, _items(value.items(), numbers, tensors, depth), strict=True):
        name, in_key = take_apart(key)
        if in_key:
            raise CantCross("a dict with a tensor as key")
        both += [name, structure]
    return both


def _check_tensor(tensor: Tensor) -> None:
    if type(tensor) not in _TENSORS:
        raise CantCross(f"a tensor of type {_type_name(type(tensor))}")
    if tensor.layout != torch.strided:
        raise CantCross(f"a tensor of layout {tensor.layout}")
    if tensor.dtype not in _DTYPES:
        raise CantCross(f"a tensor of dtype {tensor.dtype}")
    if tensor.device.type != _device_type():
        raise CantCross(f"a tensor on the device {tensor.device}, while the stages compute on {_device_type()}")


@cache
def _device_type() -> str:
    return accelerator.device().type


def _type_name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _is_named_tuple(kind: type) -> bool:
    """Whether it is one that the other side finds by its name."""
    try:
        return _class_of(_class_name(kind)) is kind
    except LookupError:
        return False


def _class_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _class_of(name: str) -> type[tuple[Any, ...]]:
    """A class of named tuples that this process has loaded; nothing is imported or run to find it."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    if not (isinstance(found, type) and issubclass(found, tuple) and (hasattr(found, "_fields") or _is_torchs(found))):
        raise LookupError(f"{name} is no named tuple that this process has loaded")
    return found


def _is_torchs(kind: type) -> bool:
    return kind.__module__ == "torch.return_types"


def _new_named(kind: type[tuple[Any, ...]], values: Sequence[Any]) -> tuple[Any, ...]:
    return kind(values) if _is_torchs(kind) else tuple.__new__(kind, values)
