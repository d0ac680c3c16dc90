"""Optimizer state that leaves and enters with its parameters.

Two kinds of optimizer exist. A *plain* one (torch, fused or CPU Adam) keeps one state entry a parameter: the
entry moves. A *flat* one (ZeRO-1, bf16; ``flat.py``) keeps each parameter group as one flat buffer. The
optimizer objects keep their identity, so that LR schedulers and users go on holding the right ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from typing_extensions import override

from dynpipe_ds.host.optimizers.flat_buffers import GroupBuffers
from dynpipe_ds.host.optimizers.groups import Entry, ParameterGroups, State
from dynpipe_ds.host.optimizers.native_adam import count_fused_step, prime_native_adam

NewBuffers = dict[int, GroupBuffers]


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

    @property
    def copies(self) -> bool:
        """Whether ``fill``, after ``prepare``, reads what comes; else it may be called while that travels."""
        return False

    @property
    def spreads_state(self) -> bool:
        """Whether replicas share out the state of parameters that they have alike."""
        return False

    @abstractmethod
    def export(self, parameters: Sequence[nn.Parameter]) -> list[State]:
        """State of parameters, complete, ready to travel; collective over their replicas, which fail together.

        Returns:
            Named tensors with as many elements as the parameter, and scalars; empty where there is none.
        """

    def shares(self, parameters: Sequence[nn.Parameter]) -> list[Share]:
        """What this replica holds of the state of parameters; communicates nothing."""
        return [Share(dict(self.groups.optimizer.state.get(p, {}))) for p in parameters]

    def template(self) -> State:
        """Kinds of what a group's state holds, moments without elements; empty where there is no such state."""
        return {}

    def make_buffers(
        self, departed: Sequence[nn.Parameter], front: Sequence[Entry], back: Sequence[Entry]
    ) -> NewBuffers:
        """Let what comes be received where it will stay; may run out of memory, communicates nothing.

        Changes the memory of the tensors that come, and nothing of what is here.

        Args:
            departed: parameters that leave.
            front: what comes before the parameters that stay, its tensors not yet filled.
            back: what comes after them.

        Returns:
            What ``prepare`` wants to know of it.
        """
        return {}

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

    @abstractmethod
    def fill(self, states: Mapping[nn.Parameter, State]) -> None:
        """Give all parameters their state, and weights where ``prepare`` put them elsewhere.

        Collective over replicas, which fail together, if it :attr:`copies`.

        Args:
            states: what ``export`` gave for the parameters that came.
        """

    def commit(self) -> None:
        """Make ``prepare`` and ``fill`` final; takes no memory and communicates nothing."""
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
