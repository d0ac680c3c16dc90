"""Flat buffers of a stage whose layers change: what stays is not copied, what comes is received into its place.

A stage holds consecutive layers, so layers leave and come at the ends of a parameter group's flat buffers. What stays
keeps its place in memory, and what comes is put next to it as long as there is room there; only then are larger
buffers made. Where replicas share out master weights and moments, these shares shift: they are made anew, and get what
stays from the replicas that have it. DeepSpeed's constructors, which would allocate and fill buffers of their own, are
given these.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.utils import torch as torch_helpers
from torch import Tensor, nn

from dynpipe_ds.host.optimizers.groups import State
from dynpipe_ds.migration.shards import FlatLayout, Place, Run, joined, runs_of

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
    """All flat buffers of one parameter group on one rank.

    Attributes:
        members: the group's parameters in the order in which they lie in the buffers.
        weights: what the model computes with, whole on every replica.
        master: fp32 weights, this rank's share.
        moments: by the optimizer's names, this rank's share.
        gradients: fp32 sums, whole, zero between batches; ``None`` where the wrapper keeps none.
        multiple: number of elements that a share is a multiple of.
        alignment: number of elements that every parameter's offset is a multiple of.
        ranks: replicas that share master weights and moments out, in order.
        rank: this one.
    """

    members: list[nn.Parameter]
    weights: Tensor
    master: Tensor
    moments: dict[str, Tensor]
    gradients: Tensor | None
    multiple: int = 2  # DeepSpeed's nccl_start_alignment_factor
    alignment: int = 1
    ranks: tuple[int, ...] = (0,)
    rank: int = 0

    @cached_property
    def layout(self) -> FlatLayout:
        """Where each parameter lies."""
        return self._layout_of(self.members)

    def _layout_of(self, members: Sequence[nn.Parameter]) -> FlatLayout:
        return FlatLayout({p: p.numel() for p in members}, self.ranks, self.multiple, self.alignment)

    @property
    def state(self) -> dict[str, Tensor]:
        """Master weights and moments by name: this rank's share of what the optimizer works on."""
        return {"master": self.master.detach(), **self.moments}

    @property
    def share_used(self) -> int:
        """Elements of this rank's share up to the end of the last parameter."""
        before = self.ranks.index(self.rank) * self.layout.share
        return min(max(self.layout.num_used - before, 0), self.layout.share)

    def clear_padding(self) -> None:
        """Zero what follows the last parameter."""
        for buffer in (self.weights, self.gradients):
            if buffer is not None:
                buffer.detach()[self.layout.num_used :].zero_()
        for buffer in self.state.values():
            buffer[self.share_used :].zero_()

    def after(self, members: list[nn.Parameter]) -> GroupBuffers:
        """The buffers after a move; these stay valid, bit for bit, until something is written for what comes.

        What stays, and stays on this rank, is in its place. The rest is not filled, gradients are zero.

        Args:
            members: at least one parameter, in their new order; what is not among the present ones comes.
        """
        old, new = self.layout, self._layout_of(members)
        size = new.share * len(self.ranks)
        whole = _Change(
            joined(run for p in members if p in old.sizes for run in runs_of(_whole(old, p), _whole(new, p))),
            [(_whole(new, p).offset, p.numel()) for p in members if p not in old.sizes], size,
            has_holes=self.alignment > 1,
        )
        if len(self.ranks) == 1:
            renewed = {key: whole.apply(buffer) for key, buffer in self.state.items()}
        elif new.places == old.places:
            renewed = self.state
        else:
            renewed = {key: self._resharded(buffer, new) for key, buffer in self.state.items()}
        gradients = None if self.gradients is None else whole.apply(self.gradients)
        if gradients is not None:
            for start, length in whole.coming:
                gradients[start:][:length].zero_()
        master = renewed.pop("master")
        return replace(
            self, members=members, weights=whole.apply(self.weights), master=master, moments=renewed,
            gradients=gradients,
        )

    def _resharded(self, buffer: Tensor, new: FlatLayout) -> Tensor:
        renewed = _new(new.share, buffer, has_holes=self.alignment > 1)
        for run in self.runs_to(new):
            if run.source == run.destination == self.rank:
                renewed[run.write_at :][: run.num_elements].copy_(buffer[run.read_at :][: run.num_elements])
        return renewed

    def runs_to(self, new: FlatLayout) -> list[Run]:
        """Which replica has and which needs what of the parameters that are here and stay here.

        Args:
            new: layout of the same replicas.
        """
        old = self.layout.places
        return joined(run for p, place in new.places.items() if p in old for run in runs_of(old[p], place))

    def receive(self, parameter: nn.Parameter) -> None:
        """Let the weights of a parameter that comes lie here; what is of another kind is copied when it has come."""
        kinds = (parameter.dtype, parameter.device), (self.weights.dtype, self.weights.device)
        if parameter.is_contiguous() and kinds[0] == kinds[1]:
            start = self.layout.places[parameter].offset
            parameter.data = self.weights[start : start + parameter.numel()].view(parameter.shape)

    def write(self, parameter: nn.Parameter, state: State) -> None:
        """Fill in the weights of a parameter, and this rank's share of its state.

        Args:
            parameter: among the members.
            state: complete; zeros stand for what it lacks, the parameter itself for missing master weights.
        """
        place = self.layout.places[parameter]
        self.weights[place.offset :][: place.num_elements].copy_(parameter.detach().reshape(-1))
        for key, buffer in self.state.items():
            value = state.get(key, parameter.detach() if key == "master" else None)
            for piece in place.pieces():
                if piece.rank == self.rank:
                    target = buffer[piece.position :][: piece.stop - piece.start]
                    if value is None:
                        target.zero_()
                    else:
                        target.copy_(value.reshape(-1)[piece.start : piece.stop])


def _new(size: int, like: Tensor, *, has_holes: bool) -> Tensor:
    """Memory for a buffer; gaps that nobody fills must not hold what looks like numbers that are none."""
    return (torch.zeros if has_holes else torch.empty)(size, dtype=like.dtype, device=like.device)


def _whole(layout: FlatLayout, parameter: nn.Parameter) -> Place:
    """Where a parameter lies in a buffer that every rank has whole."""
    place = layout.places[parameter]
    return Place((0,), layout.share * len(layout.ranks), place.offset, place.num_elements)


@dataclass(frozen=True)
class _Change:
    """How a flat buffer that a rank has whole changes.

    Attributes:
        kept: what stays.
        coming: first element and number of elements of what comes.
        size: elements of the new buffer.
        has_holes: whether parameters may have gaps between them.
    """

    kept: list[Run]
    coming: list[tuple[int, int]]
    size: int
    has_holes: bool

    def apply(self, old: Tensor) -> Tensor:
        """The new buffer, in the old one's memory where nothing that stays has to move."""
        old = old.detach()
        in_place = self._in_place(old)
        if in_place is not None:
            return in_place
        line = _LINE_BYTES // old.element_size()
        room = int(ROOM * self.size) // line * line if old.device.type == "cpu" else 0
        new = _new(self.size + 2 * room, old, has_holes=self.has_holes)[room : room + self.size]
        for run in self.kept:
            new[run.write_at :][: run.num_elements].copy_(old[run.read_at :][: run.num_elements])
        return new

    def _in_place(self, old: Tensor) -> Tensor | None:
        """A view of the old buffer's memory in which what stays need not move, if that has room for the rest."""
        shifts = {run.read_at - run.write_at for run in self.kept}
        if old.device.type != "cpu" or len(shifts) != 1:
            return None  # an accelerator's memory is given back
        [shift] = shifts
        overwrites = any(-length < start + shift < old.numel() for start, length in self.coming)
        start = old.storage_offset() + shift
        capacity = old.untyped_storage().nbytes() // old.element_size()
        fits = start >= 0 and start + self.size <= capacity <= LARGEST * self.size
        if overwrites or not fits or start * old.element_size() % _LINE_BYTES:
            return None
        view = torch.empty(0, dtype=old.dtype, device=old.device)
        return view.set_(old.untyped_storage(), start, (self.size,), (1,))


class _AlreadyMade:
    """Gives finished buffers to a DeepSpeed constructor that is about to make them from its parameters.

    What constructors make buffers with is replaced meanwhile, since a mode would slow down all else that they call.
    Where a constructor works in another way than known here it makes its own, which then must be filled.
    """

    def __init__(self, groups: Iterable[GroupBuffers]) -> None:
        self._groups = {tuple(map(id, group.members)): group for group in groups}
        self._shares = {tuple(group.master.shape) for group in self._groups.values()}
        # By where the weights begin that they belong to, and how many these are.
        self._masters: dict[tuple[int, int], Tensor] = {}
        self._gradients: dict[tuple[int, int], Tensor | None] = {}

    def makers(self) -> dict[tuple[Any, str], Callable[..., Tensor | None]]:
        """What is asked before a function of torch is called, by its owner and name; ``None``: it makes its own."""
        return {
            (torch._C._nn, "flatten_dense_tensors"): self._flatten,
            (Tensor, "clone"): lambda source, **_: self._masters.get((source.data_ptr(), source.numel())),
            (torch, "zeros_like"): lambda source, **_: self._gradients.get((source.data_ptr(), source.numel())),
            (torch, "zeros"): self._zeros,
        }

    def _zeros(self, *shape: Any, **options: Any) -> Tensor | None:
        """ZeRO only looks at them and drops them."""
        return torch.empty(1, **options).fill_(0).expand(shape) if shape in self._shares else None

    def _flatten(self, tensors: Sequence[Tensor]) -> Tensor | None:
        group = self._groups.get(tuple(id(t) for t in tensors if isinstance(t, nn.Parameter)))
        if group is None or sum(t.numel() for t in tensors) != group.weights.numel():
            return None
        weights, share = group.weights, group.layout.share
        mine = weights[group.ranks.index(group.rank) * share :][:share]
        self._masters[mine.data_ptr(), share] = group.master
        self._gradients[weights.data_ptr(), weights.numel()] = group.gradients
        return weights


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
        for (owner, name), find in _AlreadyMade(groups).makers().items():
            original = getattr(owner, name)
            if name in vars(owner):
                stack.callback(setattr, owner, name, original)
            else:  # inherited
                stack.callback(delattr, owner, name)
            setattr(owner, name, _first(find, original))
        yield


def _first(find: Callable[..., Tensor | None], make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What ``find`` finds for this thread, or else what ``make`` makes: others may work with tensors of their own."""
    thread = threading.get_ident()

    def run(*args: Any, **kwargs: Any) -> Tensor:
        found = find(*args, **kwargs) if args and threading.get_ident() == thread else None
        return make(*args, **kwargs) if found is None else found

    return run
