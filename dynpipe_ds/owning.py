"""Parameters that one data-parallel replica owns: each replica of a stage has other rows of a whole.

Elsewhere all replicas of a stage hold equal parameters, whose gradients are averaged. An owned parameter is one
replica's alone: nothing makes it equal on others, averages its gradient or shares out its optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import nn

OWNER = "owned_by_replica"  # on a parameter; plain numbers, which travel with its layer


@dataclass(frozen=True)
class Replica:
    """One of the data-parallel replicas of a stage.

    Attributes:
        index: which one.
        count: of how many.

    Raises:
        ValueError: if there can't be such a replica.
    """

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(
                f"Replica(index={self.index}, count={self.count}): must have 0 <= index < count; take what "
                "building_replica() gives"
            )

    def rows(self, num_rows: int) -> range:
        """The rows of a whole that are this replica's: replica d of R has ``[d * n / R, (d + 1) * n / R)`` of n.

        Args:
            num_rows: of the whole, over all replicas.

        Returns:
            Their numbers.

        Raises:
            ValueError: if they can't be cut evenly.
        """
        if num_rows < self.count or num_rows % self.count:
            raise ValueError(
                f"num_rows={num_rows} over {self.count} replicas: every replica must get the same number of rows, at "
                "least one; take a multiple of the number of replicas"
            )
        each = num_rows // self.count
        return range(self.index * each, (self.index + 1) * each)


_REPLICA: ContextVar[Replica] = ContextVar("replica")
_ONLY = Replica(0, 1)


@contextmanager
def building(replica: Replica) -> Iterator[None]:
    """Let layers that are built within know which replica they belong to.

    Args:
        replica: of this rank.
    """
    token = _REPLICA.set(replica)
    try:
        yield
    finally:
        _REPLICA.reset(token)


def building_replica() -> Replica:
    """Which data-parallel replica the layer that is being built belongs to.

    Returns:
        This rank's, in the constructor of a layer that a :class:`~dynpipe_ds.DynamicPipelineModule` builds, also when
        it builds one anew to receive a layer that moves; elsewhere ``Replica(0, 1)``.
    """
    return _REPLICA.get(_ONLY)


def own_by_replica(parameter: nn.Parameter, replica: Replica) -> None:
    """Mark a parameter as one replica's own rows of a whole; see docs/layers.md.

    Args:
        parameter: rows ``replica.rows(n)`` of a whole with n rows, the first dimension. Its value may differ from the
            other replicas'. Its shape must not.
        replica: what :func:`building_replica` gives where its layer is built.

    Raises:
        ValueError: if the parameter has no rows.
    """
    if parameter.dim() == 0:
        raise ValueError(
            "own_by_replica: the parameter has no dimension, so a replica can't own rows of it; give it one"
        )
    setattr(parameter, OWNER, (replica.index, replica.count))


def owner_of(parameter: nn.Parameter) -> Replica | None:
    """The replica that owns a parameter; ``None`` for one that all replicas have.

    Args:
        parameter: any.
    """
    owner = vars(parameter).get(OWNER)
    return None if owner is None else Replica(*owner)


def inherit(old: nn.Parameter, new: nn.Parameter) -> None:
    """Let a parameter that takes another's place be owned by the same replica, if any.

    Args:
        old: that leaves.
        new: that comes.

    Raises:
        ValueError: if the new one is another replica's, or one's where the old one was all replicas'.
    """
    if is_owned(new) and owner_of(new) != owner_of(old):
        raise ValueError(
            f"the new parameter is marked as {owner_of(new)}'s and the old one is {owner_of(old) or 'not owned'}; "
            "leave the new one unmarked: it is owned as the old one was"
        )
    if is_owned(old):
        setattr(new, OWNER, vars(old)[OWNER])


def is_owned(parameter: nn.Parameter) -> bool:
    """Whether a parameter is one replica's own.

    Args:
        parameter: any.
    """
    return OWNER in vars(parameter)


def owned_names(layer: nn.Module) -> tuple[str, ...]:
    """Names of a layer's parameters that replicas own.

    Args:
        layer: of the pipeline.
    """
    return tuple(name for name, parameter in layer.named_parameters() if is_owned(parameter))
