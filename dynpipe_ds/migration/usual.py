"""Modules as nearly all are: of a class that leaves it to torch how it is pickled, with tables that are mostly empty.

Torch gives every module a dozen tables, of hooks for the most part. Empty ones are not worth a word on the way: what is
not named is empty where the module arrives, too.
"""

from __future__ import annotations

import copyreg

import torch
from torch import nn

TABLES: dict[str, type] = {key: type(value) for key, value in vars(nn.Module()).items() if hasattr(value, "__len__")}
"""Kinds of the tables that every module has, by attribute."""

_OF_TORCH = tuple(
    (name, getattr(nn.Module, name, None))  # before Python 3.11 not every object has a __getstate__
    for name in ("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__", "__getattribute__")
)
_FOR_PICKLE = ("__getnewargs__", "__getnewargs_ex__", "__slots__")


def is_usual(cls: type) -> bool:
    """Whether modules of a class are their attributes, and are made anew by giving these to an empty one."""
    return (
        not issubclass(cls, torch.jit.ScriptModule) and cls not in copyreg.dispatch_table
        and all(getattr(cls, name, None) is of_torch for name, of_torch in _OF_TORCH)
        and not any(hasattr(cls, name) for name in _FOR_PICKLE)
    )
