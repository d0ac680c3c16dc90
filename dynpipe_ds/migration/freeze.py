"""Layers that the user froze or unfroze between two batches: the optimizer is rebuilt without or with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from torch import nn

from dynpipe_ds.host.optimizers.stage_optimizer import NewBuffers
from dynpipe_ds.migration.subject import Subject
from dynpipe_ds.migration.transaction import Transaction, nothing
from dynpipe_ds.migration.transport import Transfer
from dynpipe_ds.ranks.agreement import difference_of_replicas


class Change(IntEnum):
    """What the user has done to parameters since the optimizer was told; of several the greatest counts.

    Attributes:
        NONE: nothing.
        FROZEN: some were frozen, so that no stage computes or holds more than before.
        OTHER: some were unfrozen, or stand in the place of others.
    """

    NONE = 0
    FROZEN = 1
    OTHER = 2

    @classmethod
    def between(cls, before: Sequence[tuple[int, bool]], now: Sequence[tuple[int, bool]]) -> Change:
        """What lies between two answers of :func:`trainable_flags`."""
        if before == now:
            return cls.NONE
        if [parameter for parameter, _ in before] != [parameter for parameter, _ in now]:
            return cls.OTHER
        trained = [was for (_, was), (_, is_trained) in zip(before, now, strict=True) if is_trained]
        return cls.FROZEN if all(trained) else cls.OTHER


def trainable_flags(module: nn.Module) -> list[tuple[int, bool]]:
    """Identity of every parameter and whether it is trained: what changes when the user freezes or replaces any.

    Asked before every batch, so it takes the short way: ``module.parameters()`` puts names together.
    """
    flags = [(id(p), p.requires_grad) for p in module._parameters.values() if p is not None]
    for child in module._modules.values():
        if child is not None:
            flags += trainable_flags(child)
    return flags


def check_replicas(stage: Subject) -> None:
    """Check that the replicas of each stage train the same parameters; collective over all ranks.

    Raises:
        ValueError: on every rank, if replicas of some stage differ.
    """
    trained = [name for name, parameter in stage.module.named_parameters() if parameter.requires_grad]
    problem = difference_of_replicas(trained, "the parameters that are trained", stage.stage_id)
    if problem is not None:
        raise ValueError(problem)


def rebuild_optimizer(stage: Subject, *, has_changed: bool) -> None:
    """Let the optimizer hold what wants a gradient now; collective over all ranks.

    Raises:
        MigrationError: on every rank, if any rank could not do its part; its optimizer is then as before.
    """
    optimizer = stage.optimizer
    assert optimizer is not None
    change = Transaction(optimizer, stage.device, "rebuilding the optimizer for frozen layers")

    def make_buffers() -> NewBuffers:
        parameters = stage.module.parameters()
        return optimizer.make_buffers((), (), parameters) if has_changed else NewBuffers()

    if not optimizer.shares_out:  # so nothing travels, and one vote is enough
        change.run(lambda: optimizer.prepare((), {}, make_buffers()) if has_changed else None, nothing, {})
        return
    buffers, journey = among_replicas(change, stage, make_buffers)
    journey.start()
    change.run(
        lambda: optimizer.prepare((), {}, buffers) if has_changed else None, nothing, {}, journey=journey
    )


def among_replicas(
    change: Transaction, stage: Subject, make_buffers: Callable[[], NewBuffers]
) -> tuple[NewBuffers, Transfer]:
    """Make the buffers of a changed optimizer, and the journey of what replicas have of each other's; collective.

    Args:
        change: of which this is a part.
        stage: whose layers stay where they are.
        make_buffers: this rank's part.

    Returns:
        The buffers, and the journey; it has to be started, and finished before the buffers are filled.

    Raises:
        MigrationError: on every rank, if any rank could not do its part.
    """
    assert stage.optimizer is not None
    optimizer = stage.optimizer

    def get_ready() -> tuple[NewBuffers, Transfer]:
        buffers = make_buffers()
        return buffers, Transfer(
            *optimizer.parts({}, (), buffers), buffer_bytes=stage.buffer_bytes, device=stage.device
        )

    return change.together(get_ready)
