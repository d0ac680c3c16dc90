"""Partitioners by name, and running one with its result checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast, overload

from dynpipe_ds.partition.balanced import balanced
from dynpipe_ds.partition.diffusion import diffusion
from dynpipe_ds.partition.optimal import optimal
from dynpipe_ds.partition.partitioner import SHARED, BuiltIn, Capabilities, capabilities_of, solve
from dynpipe_ds.partition.plan import Plan
from dynpipe_ds.partition.prepare import prepare
from dynpipe_ds.partition.simulated import simulated
from dynpipe_ds.partition.uniform import uniform
from dynpipe_ds.placement import check_boundaries

Partitioner = Callable[..., "Plan | Sequence[int]"]
"""``f(costs, num_stages, *, current, layer_bytes, memory, pinned, speeds, allow_empty)``."""

_PartitionerT = TypeVar("_PartitionerT", bound=Partitioner)

_partitioners: dict[str, Partitioner] = {
    "uniform": uniform,
    "balanced": balanced,
    "optimal": optimal,
    "diffusion": diffusion,
    "simulated": simulated,
}


@overload
def register_partitioner(name: str, fn: _PartitionerT) -> _PartitionerT: ...


@overload
def register_partitioner(name: str) -> Callable[[_PartitionerT], _PartitionerT]: ...


def register_partitioner(name: str, fn: Any = None) -> Any:
    """Make a partitioner known by name, on every rank; a call or a decorator.

    The function is called as ``fn(costs, num_stages, *, current, layer_bytes, memory, pinned,
    speeds, allow_empty)`` and returns a :class:`Plan` or boundaries. It must decide alike on every
    rank: from its arguments only. Its parameters say what it can do: an option that it does not name
    (or take by ``**options``) is left out, and a configuration that sets memory caps or speeds for a
    partitioner without ``memory`` or ``speeds`` is refused. One that names a parameter ``profile`` also
    gets the :class:`~dynpipe_ds.PipelineProfile` that the costs are from. ::

        @register_partitioner("first_heavy")
        def first_heavy(costs, num_stages, **options):
            return [0, *range(len(costs) - num_stages + 1, len(costs) + 1)]

    Args:
        name: What ``partition_method`` and the configuration call it; not taken, no ``:``.
        fn: The partitioner; left out when used as a decorator.

    Returns:
        The function, or a decorator.

    Raises:
        ValueError: The name is empty, taken or has a ``:``.
        TypeError: ``fn`` can't be called.
    """
    _check_name(name)
    if fn is None:
        return lambda decorated: register_partitioner(name, decorated)
    if not callable(fn):
        raise TypeError(f"partitioner {name!r} is {fn!r}; it must be a function")
    _partitioners[name] = fn
    return fn


def get_partitioner(name: str) -> Partitioner:
    """Look up a partitioner.

    Args:
        name: A built-in or registered name.

    Returns:
        The function.

    Raises:
        ValueError: No such name; the message lists those that exist.
    """
    try:
        return _partitioners[name]
    except KeyError:
        names = ", ".join(partitioner_names())
        raise ValueError(
            f"unknown partitioner {name!r}; known: {names}; add one with register_partitioner"
        ) from None


def partitioner_names() -> tuple[str, ...]:
    """Names of all partitioners, sorted."""
    return tuple(sorted(_partitioners))


def wants_profile(fn: Partitioner) -> bool:
    """Whether a partitioner names a parameter ``profile``.

    Args:
        fn: A partitioner.

    Returns:
        True if it does.
    """
    return "profile" in capabilities_of(fn).named


def known_capabilities(name: str) -> Capabilities | None:
    """What a partitioner makes use of, by its name; None if no such partitioner is known yet."""
    return capabilities_of(_partitioners[name]) if name in _partitioners else None


def run_partitioner(
    fn: Partitioner, costs: Sequence[float], num_stages: int, **options: Any
) -> Plan:
    """Call a partitioner and check what it returns.

    The figures of the plan are computed here, whatever the function says; only ``rounds`` is
    taken from a plan that it returns.

    Args:
        fn: A partitioner; may return a plan or boundaries.
        costs: Cost of every layer.
        num_stages: ``S``.
        **options: The keyword arguments of a partitioner. ``profile``, ``activation_link_s`` and
            ``gradient_link_s`` may be given in any case; only a partitioner that names them gets them.

    Returns:
        The plan.

    Raises:
        InfeasiblePartitionError: The partitioner found no partition, or one that exceeds a cap.
        ValueError: An argument is wrong, or the boundaries break a rule.
    """
    problem = prepare(costs, num_stages, **{name: options[name] for name in SHARED if name in options})
    can = capabilities_of(fn)
    if hasattr(fn, "algorithm"):
        own = {name: value for name, value in options.items() if name not in SHARED and can.takes(name)}
        return solve(cast(BuiltIn, fn), problem, **own)
    result = fn(costs, num_stages, **{name: value for name, value in options.items() if can.takes(name)})
    boundaries, rounds = (
        (result.boundaries, result.rounds) if isinstance(result, Plan) else (result, 0)
    )
    name = getattr(fn, "__name__", type(fn).__name__)
    try:
        checked = check_boundaries(
            boundaries,
            num_layers=problem.starts[-1],
            num_stages=problem.num_stages,
            pinned=options.get("pinned", ()),
            allow_empty=problem.allow_empty,
        )
    except ValueError as error:
        untold = [rule for rule in ("pinned", "allow_empty") if not can.takes(rule)]
        remedy = f" (to know what is allowed it needs a parameter {' and '.join(untold)})" if untold else ""
        raise ValueError(f"partitioner {name!r}: {error}{remedy}") from error
    cuts = problem.snap(checked)
    problem.require_fit(cuts, name)
    return problem.plan(cuts, rounds)


def _check_name(name: str) -> None:
    if not name or ":" in name:
        raise ValueError(
            f"partitioner name {name!r} must not be empty or contain ':', which separates "
            "partitioner and cost in 'optimal:time'"
        )
    if name in _partitioners:
        raise ValueError(
            f"partitioner name {name!r} is taken ({', '.join(partitioner_names())}); use another"
        )
