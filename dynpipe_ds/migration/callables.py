"""Classes and functions as both ends of a move know them, and how objects are made with them.

No code travels: a class or a function is named, and only few functions may be called to make an object.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import sys
import threading
import types
import weakref
from typing import Any

from dynpipe_ds.migration.references import is_a

LOCKS: dict[type, Any] = {type(threading.Lock()): threading.Lock, type(threading.RLock()): threading.RLock}
"""A lock that a layer owns is a new one on the other side, since nobody there holds it."""

MAKERS = frozenset({
    "_thread.allocate_lock", "threading.RLock", "logging.getLogger", "importlib.import_module",
    "copyreg._reconstructor", "builtins.iter", "re._compile", "collections.OrderedDict",
    "numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar",
    "numpy._core.numeric._frombuffer", "numpy.core.numeric._frombuffer",
    "numpy.random._pickle.__generator_ctor", "numpy.random._pickle.__bit_generator_ctor",
    "numpy.random._pickle.__randomstate_ctor",
    "torch._utils._rebuild_sparse_tensor",
})
"""What else than classes may be called to make an object anew. They make data, and run no code that was received."""


def how_made(obj: Any) -> Any:
    """How an object is made anew, as its ``__reduce_ex__`` says, or should."""
    if type(obj) in LOCKS:
        return LOCKS[type(obj)], ()
    if is_a(obj, logging.Logger):
        return logging.getLogger, (obj.name,)
    if is_a(obj, types.ModuleType):
        return importlib.import_module, (obj.__name__,)
    if type(obj) is weakref.ref and obj() is not None:
        return weakref.ref, (obj(),)
    return obj.__reduce_ex__(4)


def elsewhere(function: types.BuiltinFunctionType) -> Any:
    """The node of a function that some module has under its name, though it does not say so; ``None`` if none has."""
    name = function.__name__
    for holder_name, holder in sys.modules.copy().items():
        if is_a(holder, types.ModuleType) and vars(holder).get(name) is function:
            return ("named", holder_name, name)
    return None


def named(module: str, qualname: str) -> Any:
    """What a module calls by a name, with dots; ``None`` if nothing."""
    obj: Any = sys.modules.get(module)
    for part in qualname.split("."):
        obj = getattr(obj, part, None)
    return obj


def full_name(obj: Any) -> str:
    """What a class or function calls itself, with its module."""
    return f"{getattr(obj, '__module__', '')}.{getattr(obj, '__qualname__', obj)}"


def digest_of(code: types.CodeType) -> str:
    """Tells one function's code from another's."""
    names = (code.co_code, code.co_names, code.co_freevars, code.co_varnames)
    return hashlib.blake2b(repr(names).encode(), digest_size=8).hexdigest()
