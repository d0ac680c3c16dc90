"""Whether the names that a block of Python uses exist: imports, attributes, keyword arguments."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed.runtime.pipe.engine import PipelineEngine

from dynpipe_ds.host.names import ENGINE, NEEDED

UNKNOWN = object()
"""Stands for a value of which nothing is known but that it is there."""


def problems(code: str, given: Mapping[str, Any]) -> list[str]:
    """What a block uses that does not exist.

    Args:
        code: Python.
        given: names that the page's text explains, with the class or object that they stand for, or ``UNKNOWN``.

    Returns:
        One line each.
    """
    tree = ast.parse(code)
    known: dict[str, Any] = dict(given)
    found = list(_imports(tree, known))
    bound = _bound(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id not in bound | set(known):
            if not hasattr(builtins, node.id):
                found.append(f"line {node.lineno}: nothing is called {node.id!r}")
        if isinstance(node, ast.Attribute) and _resolve(node, known, bound) is None:
            found.append(f"line {node.lineno}: {ast.unparse(node)} does not exist")
        if isinstance(node, ast.Call):
            found.extend(_arguments(node, _resolve(node.func, known, bound)))
    return found


def _imports(tree: ast.Module, known: dict[str, Any]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module = importlib.import_module(alias.name)
                known[alias.asname or alias.name.split(".")[0]] = (
                    module if alias.asname else importlib.import_module(alias.name.split(".")[0])
                )
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                if hasattr(module, alias.name):
                    known[alias.asname or alias.name] = getattr(module, alias.name)
                else:
                    yield f"line {node.lineno}: {node.module} has no {alias.name}"


def _bound(tree: ast.Module) -> set[str]:
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    return names


def _resolve(node: ast.AST, known: Mapping[str, Any], bound: set[str]) -> Any:
    """The object that an expression stands for; ``UNKNOWN`` if that can't be told; ``None`` if it does not exist."""
    if isinstance(node, ast.Name):
        return UNKNOWN if node.id in bound else known.get(node.id, getattr(builtins, node.id, UNKNOWN))
    if isinstance(node, ast.Attribute):
        of = _resolve(node.value, known, bound)
        if of is UNKNOWN or of is None:
            return UNKNOWN
        missing, look = object(), inspect.getattr_static if inspect.isclass(of) else getattr
        value = look(of, node.attr, missing)
        if value is missing:
            return UNKNOWN if _is_set_later(of, node.attr) else None
        return value if inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value) else UNKNOWN
    return UNKNOWN


def _is_set_later(of: Any, name: str) -> bool:
    """Whether it is an attribute that DeepSpeed's own engine sets."""
    return inspect.isclass(of) and issubclass(of, PipelineEngine) and name in NEEDED[ENGINE].attributes


def _arguments(call: ast.Call, function: Any) -> Iterator[str]:
    if function is UNKNOWN or function is None:
        return
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    names = {p.name for p in parameters}
    for keyword in call.keywords:
        if keyword.arg is not None and keyword.arg not in names:
            yield f"line {call.lineno}: {ast.unparse(call.func)} takes no {keyword.arg}="
