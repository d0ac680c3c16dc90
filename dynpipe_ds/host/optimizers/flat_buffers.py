"""Flat buffers of a stage whose layers change: what stays is not copied, what comes is received into its place.

A stage holds consecutive layers, so layers leave and come at the ends of a parameter group's flat buffers. What stays
keeps its place in memory, and what comes is put next to it as long as there is room there; only then are larger
buffers made. DeepSpeed's constructors, which would allocate and fill buffers of their own, are given these.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.utils import torch as torch_helpers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from dynpipe_ds.host.optimizers.groups import Entry

ROOM = 0.5
"""Elements left free at either end of a new buffer in host memory, as a share of those in use.

What nobody has written to takes no host memory. On accelerators it would; copying is fast there.
"""

LARGEST = 3.0
"""Elements that a buffer's memory may hold, as a multiple of those in use; beyond that the memory is given back."""

_LINE_BYTES = 64  # where torch lets buffers begin; kernels choose by alignment, so another could mean other bits
_REPORTS = (
    (bf16_optimizer, "see_memory_usage"), (stage_1_and_2, "see_memory_usage"), (stage_1_and_2, "empty_cache"),
)

_asked_once = functools.cache(torch_helpers.required_torch_version)
"""DeepSpeed asks once a parameter, which takes longer than all else that is done with it."""


@dataclass(frozen=True)
class GroupBuffers:
    """All flat buffers of one parameter group that one rank holds whole.

    Attributes:
        members: the group's parameters in the order in which they lie in the buffers.
        weights: what the model computes with.
        master: fp32 weights.
        moments: by the optimizer's names.
        gradients: fp32 sums, zero between batches; ``None`` where the wrapper keeps none.
        multiple: number of elements that the buffers' length is a multiple of.
    """

    members: list[nn.Parameter]
    weights: Tensor
    master: Tensor
    moments: dict[str, Tensor]
    gradients: Tensor | None
    multiple: int = 2  # DeepSpeed's nccl_start_alignment_factor

    def clear_padding(self) -> None:
        """Zero what follows the last parameter."""
        num_used = _num_elements(self.members)
        for buffer in (self.weights, self.master, self.gradients, *self.moments.values()):
            if buffer is not None and buffer.numel() > num_used:
                buffer.detach()[num_used:].zero_()

    def after(
        self, gone: set[nn.Parameter], front: Sequence[Entry], back: Sequence[Entry]
    ) -> GroupBuffers | None:
        """The buffers after a move; these stay valid, bit for bit, until something is written to the new ones' ends.

        The tensors of what comes are made to lie in the new buffers, not yet filled.

        Args:
            gone: parameters that leave, or leave the group.
            front: what comes before the parameters that stay.
            back: what comes after them.

        Returns:
            The new buffers; ``None`` if parameters leave from the middle, or what comes is of another kind.
        """
        staying = [i for i, p in enumerate(self.members) if p not in gone]
        kept = [self.members[i] for i in staying]
        members = [*(e.parameter for e in front), *kept, *(e.parameter for e in back)]
        in_one_piece = not staying or staying[-1] - staying[0] == len(staying) - 1
        if not members or not in_one_piece or not all(self._takes(e) for e in (*front, *back)):
            return None
        cut = _Cut(
            num_before=_num_elements(e.parameter for e in front),
            first=_num_elements(self.members[: staying[0]]) if staying else 0,
            num_kept=_num_elements(kept),
            num_after=_num_elements(e.parameter for e in back),
            multiple=self.multiple,
        )
        new = GroupBuffers(
            members, cut.apply(self.weights), cut.apply(self.master),
            {key: cut.apply(moment) for key, moment in self.moments.items()},
            None if self.gradients is None else cut.apply(self.gradients),
            self.multiple,
        )
        new._place(front, 0)
        new._place(back, cut.num_before + cut.num_kept)
        return new

    def _takes(self, entry: Entry) -> bool:
        """Whether a parameter's tensors can lie in such buffers."""
        numel, state = entry.parameter.numel(), dict(entry.state)
        pairs = [(entry.parameter, self.weights), (state.pop("master", None), self.master)]
        pairs += [(state.pop(key, None), moment) for key, moment in self.moments.items()]
        strange = [v for v in state.values() if isinstance(v, Tensor) and v.numel() == numel > 1]
        return not strange and all(
            isinstance(t, Tensor) and t.numel() == numel and t.is_contiguous()
            and (t.dtype, t.device) == (buffer.dtype, buffer.device)
            for t, buffer in pairs
        )

    def _place(self, entries: Iterable[Entry], start: int) -> None:
        for entry in entries:
            stop = start + entry.parameter.numel()
            entry.parameter.data = self.weights[start:stop].view(entry.parameter.shape)
            for key, buffer in {"master": self.master, **self.moments}.items():
                entry.state[key].data = buffer[start:stop].view(entry.state[key].shape)
            if self.gradients is not None:
                self.gradients[start:stop].zero_()
            start = stop


@dataclass(frozen=True)
class _Cut:
    """How a flat buffer changes, in elements: some come before, some of the old ones stay, some come after."""

    num_before: int
    first: int  # of those that stay, in the old buffer
    num_kept: int
    num_after: int
    multiple: int

    def apply(self, old: Tensor) -> Tensor:
        old = old.detach()
        num_used = self.num_before + self.num_kept + self.num_after
        size = num_used + -num_used % self.multiple
        in_place = self._in_place(old, size)
        if in_place is not None:
            return in_place
        line = _LINE_BYTES // old.element_size()
        room = int(ROOM * size) // line * line if old.device.type == "cpu" else 0
        new = torch.empty(size + 2 * room, dtype=old.dtype, device=old.device)[room : room + size]
        new[self.num_before :][: self.num_kept].copy_(old[self.first :][: self.num_kept])
        return new

    def _in_place(self, old: Tensor, size: int) -> Tensor | None:
        """A view of the old buffer's memory in which what stays need not move, if that has room for the rest."""
        if old.device.type != "cpu" or not self.num_kept:
            return None  # an accelerator's memory is given back
        overwrites_front = self.num_before and self.first
        overwrites_back = self.num_after and self.first + self.num_kept < old.numel()
        start = old.storage_offset() + self.first - self.num_before
        capacity = old.untyped_storage().nbytes() // old.element_size()
        fits = start >= 0 and start + size <= capacity <= LARGEST * size
        if overwrites_front or overwrites_back or not fits or start * old.element_size() % _LINE_BYTES:
            return None
        view = torch.empty(0, dtype=old.dtype, device=old.device)
        return view.set_(old.untyped_storage(), start, (size,), (1,))


def _num_elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)


_MAKERS = frozenset({torch._C._nn.flatten_dense_tensors, Tensor.clone, torch.zeros_like, torch.zeros})
"""What DeepSpeed's constructors make their buffers with."""


class _AlreadyMade(TorchFunctionMode):
    """Gives finished buffers to a DeepSpeed constructor that is about to make them from its parameters.

    Where a constructor works in another way than known here it makes its own, which then must be filled.
    """

    def __init__(self, groups: Iterable[GroupBuffers]) -> None:
        super().__init__()
        self._groups = {tuple(map(id, group.members)): group for group in groups}
        self._flattened: dict[int, GroupBuffers] = {}

    @override
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _MAKERS:
            return func(*args, **(kwargs or {}))
        given: Tensor | None = None
        if func is torch._C._nn.flatten_dense_tensors:
            given = self._flatten(args[0])
        elif func is Tensor.clone or func is torch.zeros_like:
            group = self._flattened.get(args[0].data_ptr())
            if group is not None and args[0].numel() == group.weights.numel():
                given = group.master if func is Tensor.clone else group.gradients
        elif func is torch.zeros and any(group.master.shape == args for group in self._groups.values()):
            given = torch.zeros(1, **(kwargs or {})).expand(args)  # ZeRO only looks at it and drops it
        return func(*args, **(kwargs or {})) if given is None else given

    def _flatten(self, tensors: Sequence[Tensor]) -> Tensor | None:
        group = self._groups.get(tuple(id(t) for t in tensors if isinstance(t, nn.Parameter)))
        if group is None or sum(t.numel() for t in tensors) != group.weights.numel():
            return None
        self._flattened[group.weights.data_ptr()] = group
        return group.weights


def _is_warning(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING


@contextlib.contextmanager
def building(groups: Iterable[GroupBuffers]) -> Iterator[None]:
    """Build a DeepSpeed optimizer from finished buffers, without its chatter and its reports of memory.

    These collect garbage, or empty the accelerator's cache, several times a parameter group.
    """
    logger = logging.getLogger("DeepSpeed")
    with contextlib.ExitStack() as stack:
        for module, name in _REPORTS:
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, lambda *_, **__: None)
        stack.callback(setattr, torch_helpers, "required_torch_version", torch_helpers.required_torch_version)
        torch_helpers.required_torch_version = _asked_once
        if (accelerator := get_accelerator()).device_name() == "cpu":  # whatever is left, buffers are made there
            stack.callback(delattr, accelerator, "available_memory")
            accelerator.available_memory = lambda *_: math.inf  # asking the system takes long
        logger.addFilter(_is_warning)  # setting a level makes every logger of the process forget what it knows
        stack.callback(logger.removeFilter, _is_warning)
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(_AlreadyMade(groups))
        yield
