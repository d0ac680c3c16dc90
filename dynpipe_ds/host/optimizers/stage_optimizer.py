"""Optimizer state that leaves and enters with its parameters.

Two kinds of optimizer exist. A *plain* one (torch, fused or CPU Adam) keeps one state entry a parameter: the
entry moves. A *flat* one (ZeRO-1, bf16; ``flat.py``) keeps each parameter group as one flat buffer. The
optimizer objects keep their identity, so that LR schedulers and users go on holding the right ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn
from typing_extensions import override

from dynpipe_ds.host.optimizers.flat_buffers import GroupBuffers
from dynpipe_ds.host.optimizers.groups import Entry, ParameterGroups, State
from dynpipe_ds.host.optimizers.native_adam import count_fused_step, prime_native_adam

PlaceText = tuple[tuple[int, ...], int, int]
"""Ranks, share and offset of a ``Place``, which is how it travels."""


class NewBuffers(NamedTuple):
    """Flat buffers that are about to change.

    Attributes:
        old: as they are, by parameter group.
        new: as they will be, of the groups that will have parameters.
    """

    old: Sequence[GroupBuffers] = ()
    new: Mapping[int, GroupBuffers] = MappingProxyType({})


class Parts(NamedTuple):
    """Slices of flat buffers on their way between ranks, in an order that both know.

    Attributes:
        sends: by destination.
        receives: by source.
    """

    sends: dict[int, list[Tensor]]
    receives: dict[int, list[Tensor]]


class Share(NamedTuple):
    """What one replica holds of a parameter's state; shares memory with the optimizer's.

    Attributes:
        state: named tensors and scalars.
        spread: names of those that replicas share out; here they are this replica's elements, in one dimension.
        start: the first of these elements, among the parameter's.
    """

    state: State
    spread: frozenset[str] = frozenset()
    start: int = 0


class StageOptimizer(ABC):
    """What the engine needs to know of the optimizer on one stage.

    Args:
        engine: the pipeline engine that owns the optimizer.
        groups: the parameter groups all stages agreed on.
    """

    def __init__(self, engine: Any, groups: ParameterGroups) -> None:
        self.engine = engine
        self.groups = groups
        self._before: Any = None  # what rollback() needs; None outside prepare() ... commit()

    @property
    def is_changing(self) -> bool:
        """Whether ``prepare`` has begun a change that is neither final nor undone."""
        return self._before is not None

    @abstractmethod
    def export(self, parameters: Sequence[nn.Parameter]) -> list[State]:
        """State of parameters, complete, ready to travel; collective over their replicas, which fail together.

        Returns:
            Named tensors with as many elements as the parameter, and scalars; empty where there is none.
        """

    @property
    def shares_out(self) -> bool:
        """Whether replicas share out its state, so that layers that move have to be told where it shall lie."""
        return False

    def describe(self, parameters: Sequence[nn.Parameter]) -> list[State]:
        """What the receiver of parameters that leave has to be sent, or told, of their state."""
        return self.export(parameters)

    def shares(self, parameters: Sequence[nn.Parameter]) -> list[Share]:
        """What this replica holds of the state of parameters; communicates nothing."""
        return [Share(dict(self.groups.optimizer.state.get(p, {}))) for p in parameters]

    def template(self) -> State:
        """Kinds of what a group's state holds, moments without elements; empty where there is no such state."""
        return {}

    def make_buffers(
        self, departed: Sequence[nn.Parameter], coming: Sequence[Entry], order: Iterable[nn.Parameter], *,
        is_here: bool = False,
    ) -> NewBuffers:
        """Let what comes be received where it will stay; may run out of memory, communicates nothing.

        Changes the memory of the parameters that come, and nothing of what is here.

        Args:
            departed: parameters that leave.
            coming: those that come, not yet filled.
            order: all parameters of this stage in the order in which they will be registered.
            is_here: whether what comes is here already, complete: it is new, or was frozen.

        Returns:
            What ``prepare`` wants to know of it.
        """
        return NewBuffers()

    def places(self, coming: Sequence[Entry], buffers: NewBuffers) -> list[PlaceText | None]:
        """Where the state of parameters that come shall lie, for :meth:`parts` of those that send it."""
        return [None] * len(coming)

    def parts(
        self, going: Mapping[int, Sequence[tuple[nn.Parameter, PlaceText | None]]],
        coming: Sequence[Entry], buffers: NewBuffers,
    ) -> Parts:
        """What of the state this rank sends and receives by itself, apart from what :meth:`describe` gave.

        Args:
            going: by the rank that takes the same place in another stage, parameters that go there, and where they
                shall lie.
            coming: entries of those that come, stage by stage in the sender's order.
            buffers: what :meth:`make_buffers` returned; empty if nothing comes.
        """
        return Parts({}, {})

    @abstractmethod
    def prepare(
        self, departed: Iterable[nn.Parameter], arrived: Mapping[nn.Parameter, int], buffers: NewBuffers | None = None
    ) -> None:
        """Take in the stage's new set of parameters; may run out of memory, communicates nothing.

        Args:
            departed: parameters that leave.
            arrived: group index of each parameter that comes; its weights may still travel.
            buffers: what ``make_buffers`` returned for these.
        """

    def fill(self, states: Mapping[nn.Parameter, State]) -> None:  # noqa: B027 - there may be nothing to do
        """Give parameters their state after ``prepare``; communicates nothing, and reads nothing that may still travel.

        Args:
            states: what ``describe`` gave for the parameters that came.
        """

    def commit(self) -> None:
        """Make ``prepare`` and ``fill`` final, now that all has come; takes no memory and communicates nothing."""
        self._before = None

    @abstractmethod
    def rollback(self) -> None:
        """Undo ``prepare`` and ``fill``, complete or broken off, bit for bit; nothing to do if they had not begun."""

    @abstractmethod
    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """The gradient that the next step will use, before it is reduced over replicas."""

    @abstractmethod
    def put_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Replace what :meth:`gradient` gives.

        Args:
            parameter: one that is trained.
            gradient: of its shape; it is copied, into the dtype that gradients are summed in.
        """

    @abstractmethod
    def state_bytes(self, parameter: nn.Parameter) -> int:
        """Bytes of optimizer state, master weights included, that this rank holds for a parameter."""

    def before_step(self) -> None:
        """Get ready for an optimizer step, which follows at once."""
        self.groups.follow()
        prime_native_adam(self.groups.optimizer)

    def after_step(self) -> None:
        """Take note of an optimizer step that was not skipped."""
        count_fused_step(self.groups.optimizer)


class PlainOptimizer(StageOptimizer):
    """One state entry a parameter: torch optimizers, DeepSpeed's fused and CPU Adam."""

    @override
    def export(self, parameters: Sequence[nn.Parameter]) -> list[State]:
        return [dict(self.groups.optimizer.state.get(p, {})) for p in parameters]

    @override
    def prepare(
        self, departed: Iterable[nn.Parameter], arrived: Mapping[nn.Parameter, int], buffers: NewBuffers | None = None
    ) -> None:
        optimizer, departed = self.groups.optimizer, list(departed)
        self._before = self.groups.snapshot(), dict(optimizer.state)
        self.groups.replace(departed, arrived)
        self.groups.sort(self.engine.module.parameters())
        self.groups.install(trainable_only=False)
        frozen = [p for p in self.groups.index if not p.requires_grad]
        for parameter in (*departed, *frozen):
            optimizer.state.pop(parameter, None)
            parameter.grad = None

    @override
    def fill(self, states: Mapping[nn.Parameter, State]) -> None:
        for parameter, state in states.items():
            if state:
                self.groups.optimizer.state[parameter] = state

    @override
    def rollback(self) -> None:
        if self._before is None:
            return
        optimizer = self.groups.optimizer
        snapshot, state = self._before
        self.groups.put_back(snapshot)
        optimizer.state.clear()
        optimizer.state.update(state)
        self._before = None

    @override
    def gradient(self, parameter: nn.Parameter) -> Tensor | None:
        return parameter.grad

    @override
    def put_gradient(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        parameter.grad = gradient.detach().to(parameter.dtype, copy=True)

    @override
    def state_bytes(self, parameter: nn.Parameter) -> int:
        state = self.groups.optimizer.state.get(parameter, {})
        return sum(v.nbytes for v in state.values() if isinstance(v, Tensor))
