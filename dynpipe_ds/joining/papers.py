"""Proof that a newcomer fits: what it would train is what the job trains, value by value.

Papers are plain values. The job's own and a newcomer's are compared on the job's side, before anybody waits for the
newcomer; it is refused with every difference.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

_DEPTH = 4
_MOST = 8
_LONGEST = 200
_PLAIN = (bool, int, float, str, bytes, type(None))

REMEDY = {
    "versions": "install what the job runs with",
    "model": "start the script with the arguments that the job's ranks have",
    "config": "give it the DeepSpeed JSON that the job's ranks have",
    "optimizer": "give it an optimizer of that kind with as many parameter groups, empty ones included",
    "data": "give it the data that the job's ranks have",
}
"""By part of the papers, what to do about a difference."""


def describe_layers(names: Sequence[str], specs: Sequence[Any]) -> list[Any]:
    """What a model's layers are made of, none of them built: names, classes and arguments.

    Args:
        names: of every layer.
        specs: the layer list.
    """
    return [{"name": name, "of": describe(_made_of(spec))} for name, spec in zip(names, specs, strict=True)]


def _made_of(spec: Any) -> Any:
    if isinstance(spec, nn.Module):
        return type(spec)  # its parameters change, and it may have moved to another rank
    if hasattr(spec, "typename"):
        more = {key: vars(spec).get(key) for key in ("key", "tied_weight_attr", "forward_fn")}
        return [spec.typename, list(spec.module_args), dict(spec.module_kwargs), more]
    return spec if callable(spec) else type(spec).__qualname__


def describe(value: Any, depth: int = _DEPTH) -> Any:
    """A value as plain ones that are the same in another process: no addresses, of tensors no elements.

    Args:
        value: anything.
        depth: how many objects deep to look.
    """
    if isinstance(value, _PLAIN):
        return repr(value) if isinstance(value, bytes | float) else value
    if isinstance(value, Tensor):
        return f"tensor {list(value.shape)} {value.dtype}"
    if isinstance(value, type | FunctionType):
        return f"{value.__module__}.{value.__qualname__}" if value.__module__ != "__main__" else value.__qualname__
    if isinstance(value, torch.dtype | torch.device):
        return str(value)
    if depth == 0:
        return type(value).__qualname__
    inner = partial(describe, depth=depth - 1)
    if isinstance(value, partial):
        return {"partial": inner(value.func), "args": inner(value.args), "kwargs": inner(value.keywords)}
    if isinstance(value, Mapping):
        return {str(key): inner(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(str(inner(item)) for item in value)
    if isinstance(value, Sequence):
        return [inner(item) for item in value]
    public = {key: inner(item) for key, item in sorted(vars(value).items())} if hasattr(value, "__dict__") else {}
    return {"class": type(value).__qualname__, **public}


def versions(**more: str) -> dict[str, str]:
    """What both sides run with.

    Args:
        **more: versions by name, besides Python's and torch's.
    """
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python, "torch": torch.__version__, **more}


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Every difference between the job's papers and a newcomer's, one line each, with the remedy; none if it fits.

    Args:
        ours: the job's.
        theirs: the newcomer's.
    """
    found = []
    for part in ours:
        lines = list(_differences(part, ours[part], theirs.get(part)))
        hidden = len(lines) - _MOST
        lines = lines[:_MOST] + ([f"{part}: {hidden} more"] if hidden > 0 else [])
        found += [f"{line}; {REMEDY[part]}" if part in REMEDY else line for line in lines]
    return found


def _differences(where: str, ours: Any, theirs: Any) -> Iterator[str]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in sorted({*ours, *theirs}, key=str):
            yield from _differences(f"{where}.{key}", ours.get(key), theirs.get(key))
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(f"{where}[{i}]", mine, its)
    elif isinstance(ours, list) and isinstance(theirs, list):
        yield f"{where}: {len(ours)} of them in the job, {len(theirs)} here"
    elif ours != theirs:
        yield f"{where}: {_short(ours)} in the job, {_short(theirs)} here"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
