"""What ``torch.compile`` was given, read from what it made, so that a layer is compiled again where it arrives.

Compiled code belongs to its process. What travels is the recipe: the arguments of ``torch.compile`` as plain values,
beside the module or function that was compiled. They stand in attributes of torch that are not public; where a torch
keeps them elsewhere, the layer is refused at start.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

Recipe = dict[str, Any]
"""Keyword arguments of ``torch.compile``."""

CALL = "_compiled_call_impl"
"""Attribute of a module that was compiled in place, by ``module.compile()``."""

WRAPPED = "_orig_mod"
"""Name of a module in what ``torch.compile`` makes of it."""

_ROUNDS_AS_EAGER = ("eager", "aot_eager", "aot_eager_decomp_partition", "pre_dispatch_eager")
_AUTOTUNED = ("max_autotune", "coordinate_descent_tuning", "autotune")


class UnreadableError(TypeError):
    """The arguments of ``torch.compile`` can't be found.

    Args:
        what: was compiled, and why they can't.
    """


def is_compiled_module(obj: Any) -> bool:
    """Whether it is what ``torch.compile`` makes of a module."""
    cls = type(obj)
    return issubclass(cls, nn.Module) and cls.__name__ == "OptimizedModule" and cls.__module__.startswith("torch.")


def is_compiled_function(obj: Any) -> bool:
    """Whether it is what ``torch.compile`` makes of a function or method."""
    return type(obj) is types.FunctionType and callable(getattr(_context(obj), "callback", None))


def original_of(compiled: Any) -> Any:
    """What was compiled: a module, a function, a bound method or another callable."""
    if is_compiled_module(compiled):
        return compiled._orig_mod
    original = compiled._torchdynamo_orig_callable
    if getattr(original, "__module__", None) == "torch._dynamo.external_utils" or _is_wrapping(original):
        original = original.__wrapped__  # torch gives a frame to what has none
    return original


def _is_wrapping(function: Any) -> bool:
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.endswith("external_utils.py") and hasattr(function, "__wrapped__")


def recipe_of(compiled: Any) -> Recipe:
    """The arguments of ``torch.compile``, the defaults left out.

    Args:
        compiled: a module or a function.

    Raises:
        UnreadableError: if they can't be read.
    """
    context = _context(compiled)
    chain = list(_backends(getattr(context, "callback", None)))
    backend = chain[-1] if chain else None
    found = _of_backend(backend)
    if getattr(backend, "dynamic", None) is not None:
        found["dynamic"] = backend.dynamic  # type: ignore[union-attr]
    if getattr(context, "fullgraph", False):
        found["fullgraph"] = True
    if getattr(context, "_isolate_recompiles_id", -1) != -1:
        found["isolate_recompiles"] = True
    limits = [limit for link in chain if (limit := getattr(link, "_recompile_limit", None)) is not None]
    if limits:
        found["recompile_limit"] = limits[0]
    guard = getattr(getattr(context, "_hooks", None), "guard_filter_fn", None)
    if guard is not None:
        found["options"] = {**found.get("options", {}), "guard_filter_fn": guard}
    if getattr(context, "_shapes_spec", None) is not None:
        raise UnreadableError("what was compiled with shapes_spec, which can't be given again")
    return found


def _context(compiled: Any) -> Any:
    """Torch's own object with the arguments."""
    if is_compiled_module(compiled):
        return vars(compiled).get("dynamo_ctx")
    if "_torchdynamo_orig_callable" not in getattr(compiled, "__dict__", {}):
        return None
    cells = zip(compiled.__code__.co_freevars, compiled.__closure__ or (), strict=True)
    return next((cell.cell_contents for name, cell in cells if name == "self"), None)


def _backends(callback: Any) -> Iterator[Any]:
    while callback is not None:
        yield callback
        callback = getattr(callback, "_torchdynamo_orig_backend", None)


def _of_backend(backend: Any) -> Recipe:
    kind = type(backend).__name__
    if kind == "_TorchCompileInductorWrapper":
        named = {} if getattr(backend, "name", None) is None else {"name": backend.name}
        return {"backend": "inductor", **({"options": dict(backend.config)} if backend.config else {}), **named}
    if kind == "_TorchCompileWrapper":
        name, function = backend.compiler_name, backend.compiler_fn
        return {"backend": name if _registered(name) is function else function, **backend.kwargs}
    raise UnreadableError(
        f"what was compiled, of which torch {torch.__version__} does not tell the arguments (a {kind})"
    )


def _registered(name: str) -> Any:
    """The backend that torch knows by a name; ``None`` if there is none."""
    from torch._dynamo.backends.registry import lookup_backend

    try:
        return lookup_backend(name)
    except Exception:  # noqa: BLE001 - torch's error has another class in every release
        return None


def compile_again(original: Any, recipe: Recipe) -> Any:
    """Compile a module or function; what it is compiled into is made when it is first called.

    Args:
        original: module or function.
        recipe: from :func:`recipe_of`.
    """
    return torch.compile(original, **_own(recipe))


def compile_in_place(module: nn.Module, recipe: Recipe) -> None:
    """Compile a module as ``module.compile()`` does.

    Args:
        module: which.
        recipe: from :func:`recipe_of`.
    """
    nn.Module.compile(module, **_own(recipe))


def _own(recipe: Recipe) -> Recipe:
    """A recipe that torch may take items out of."""
    return {key: dict(value) if type(value) is dict else value for key, value in recipe.items()}


def compiled_parts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What is compiled in a layer, each with its path.

    Args:
        module: the layer.
    """
    if "torch._dynamo" not in sys.modules:
        return
    for path, part in module.named_modules():
        if is_compiled_module(part):
            yield path, part
        for name, value in vars(part).items():
            if is_compiled_function(value) and not (name == "forward" and is_compiled_module(part)):
                yield ".".join(step for step in (path, name.removeprefix(CALL)) if step), value


def why_bits_differ(recipe: Recipe) -> str | None:
    """Why what is compiled may round otherwise on another stage; ``None`` if it does not.

    Args:
        recipe: from :func:`recipe_of`.
    """
    if recipe["backend"] in _ROUNDS_AS_EAGER:
        return None
    tuned = sorted(key for key, value in (recipe.get("options") or {}).items() if value and key.startswith(_AUTOTUNED))
    if tuned or "autotune" in str(recipe.get("mode")):
        return (
            f"{tuned[0] if tuned else recipe['mode']!r} chooses code by how long it takes, so that another rank may "
            "choose code that rounds otherwise; leave it out"
        )
    if recipe.get("dynamic") is not False:
        return (
            f"dynamic={recipe.get('dynamic')}: torch then compiles code for sizes that it has not seen, which rounds "
            "otherwise than code for one size, and what a rank has seen depends on the cut; pass dynamic=False"
        )
    return None
