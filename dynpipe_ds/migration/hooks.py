"""Handles of hooks whose layers have moved: what is removed here is removed where the layer is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import getweakrefcount

import torch.distributed as dist
from torch import Tensor, nn

from dynpipe_ds.host.names import PARAMETER_MARKS
from dynpipe_ds.migration.encoding import HOOK_TABLES

TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
HOOK_FLAGS = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")


NOT_CARRIED = PARAMETER_MARKS | {"ds_pipe_replicated"}
"""What DeepSpeed and we put on a tensor, anew wherever its layer arrives."""


class Hook(NamedTuple):
    """Where a hook is, on whichever rank its layer is.

    Attributes:
        layer: index of its layer.
        part: name of the module or tensor that it is registered with, in the layer.
        table: name of its table there.
        number: its key in the table, which its handle knows.
    """

    layer: int
    part: str
    table: str
    number: int


def hook_tables(layer: nn.Module) -> Iterator[tuple[str, str, Any]]:
    """The tables with hooks in a layer, by name of the part and of the table."""
    for part, module in layer.named_modules():
        yield from ((part, name, table) for name in HOOK_TABLES if (table := getattr(module, name, None)))
    for part, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        yield from ((part, name, table) for name in TENSOR_HOOKS if (table := getattr(tensor, name, None)))


def is_optimizers(hook: Any) -> bool:
    """Whether DeepSpeed's optimizer registered a hook; the new owner's registers its own."""
    return str(getattr(hook, "__module__", "")).partition(".")[0] == "deepspeed"


def hooks_of(tensor: Tensor) -> list[tuple[str, int, Any]]:
    """The hooks of a tensor that travel with it: table, number and hook."""
    # Those of an activation that a layer keeps (an auxiliary loss) belong to the graph that made it.
    tables = TENSOR_HOOKS if tensor.is_leaf else ()
    found = ((table, number, hook) for table in tables for number, hook in (getattr(tensor, table, None) or {}).items())
    return [entry for entry in found if not is_optimizers(entry[2])]


def _gone(*_: Any, **__: Any) -> None:
    """Stands for a hook that is elsewhere, so that its table does not keep the hook's objects alive."""


class DepartedHooks:
    """The tables of layers that left this rank: a handle takes its hook out of them, and nowhere else."""

    def __init__(self) -> None:
        self._tables: list[tuple[Hook, dict[int, Any]]] = []

    def keep(self, layer: int, module: nn.Module) -> None:
        """Watch the tables of a layer that has left, as long as there are handles."""
        self._tables = [(hook, table) for hook, table in self._tables if getweakrefcount(table)]
        for part, name, table in hook_tables(module):
            if not getweakrefcount(table):
                continue  # no handle is left to use
            for number in [number for number, hook in table.items() if not is_optimizers(hook)]:
                table[number] = _gone
                self._tables.append((Hook(layer, part, name, number), table))

    def has_removed(self) -> bool:
        """Whether a handle was used since :meth:`take_removed`."""
        return any(hook.number not in table for hook, table in self._tables)

    def take_removed(self) -> list[Hook]:
        """The hooks whose handles were used, each once."""
        removed = [hook for hook, table in self._tables if hook.number not in table]
        self._tables = [(hook, table) for hook, table in self._tables if hook.number in table]
        return removed


def remove_everywhere(departed: DepartedHooks, layers: Mapping[int, nn.Module]) -> None:
    """Remove hooks whose handles were used on ranks that their layers had left; collective over all ranks."""
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, [tuple(hook) for hook in departed.take_removed()])
    for layer, part, table, number in (hook for hooks in everything for hook in hooks):
        if layer in layers:
            _remove(layers[layer], part, table, number)


def _remove(layer: nn.Module, part: str, table: str, number: int) -> None:
    if table in TENSOR_HOOKS:
        owner, _, name = part.rpartition(".")
        holder: Any = getattr(layer.get_submodule(owner), name, None)
        tables = [table]
    else:
        holder = layer.get_submodule(part)
        tables = [table, *HOOK_FLAGS]
    for name in tables:
        (getattr(holder, name, None) or {}).pop(number, None)
