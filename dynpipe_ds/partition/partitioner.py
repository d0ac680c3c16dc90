"""From an algorithm, ``f(problem) -> cuts``, to the function that users call.

An algorithm sees a checked :class:`Problem` and returns where to cut between its groups. All else is the
same for every one and done here: the arguments, their checks, memory caps, the figures of the plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from dynpipe_ds.partition.memory import StageMemory
from dynpipe_ds.partition.plan import Plan
from dynpipe_ds.partition.prepare import prepare
from dynpipe_ds.partition.problem import Problem

Cuts = Sequence[int]
"""``S + 1`` indices of groups: stage ``s`` holds the groups ``cuts[s] <= k < cuts[s + 1]``."""


@dataclass(frozen=True)
class Refined:
    """What an iterative algorithm returns instead of cuts alone.

    Attributes:
        cuts: Where it ended.
        rounds: How many rounds it took.
    """

    cuts: Cuts
    rounds: int


Algorithm = Callable[..., Cuts | Refined]
"""``f(problem, *, options of its own) -> cuts``."""

SHARED = tuple(inspect.signature(prepare).parameters)[2:]
"""Options that every partitioner is given: what :func:`prepare` takes after costs and stages."""

OFFERED = ("profile", "activation_link_s", "gradient_link_s")
"""Options that a partitioner gets only if it names them."""


@dataclass(frozen=True)
class Capabilities:
    """What a partitioner makes use of; all it returns is checked in any case.

    Attributes:
        memory_caps: It looks for a partition within the caps.
        speeds: It weighs stages by their speed.
        named: Its options, by name: with ``pinned`` it is told of forbidden cuts, with ``profile`` it gets that.
    """

    memory_caps: bool = True
    speeds: bool = True
    named: frozenset[str] = frozenset()

    def takes(self, option: str) -> bool:
        """Whether to hand an option over; one that nobody knows is, so that the mistake is noticed."""
        return option in self.named or option not in (*SHARED, *OFFERED)


class BuiltIn(Protocol):
    """A partitioner that :func:`partitioner` made of an algorithm."""

    __name__: str
    algorithm: Algorithm
    capabilities: Capabilities

    def __call__(
        self,
        costs: Sequence[float],
        num_stages: int,
        *,
        current: Sequence[int] | None = None,
        layer_bytes: Sequence[int] | None = None,
        memory: StageMemory | None = None,
        pinned: Sequence[int] = (),
        speeds: Sequence[float] | None = None,
        allow_empty: bool = False,
        **options: Any,
    ) -> Plan:
        """Choose a partition."""
        ...


def partitioner(*, memory_caps: bool = True, speeds: bool = True) -> Callable[[Algorithm], BuiltIn]:
    """Make a partitioner of an algorithm; a decorator.

    A :class:`Problem` has no forbidden cuts, so every algorithm keeps pins; ``Problem.allow_empty`` is
    the algorithm's to obey.

    Args:
        memory_caps: Whether it looks for cuts that ``Problem.fits`` allows.
        speeds: Whether ``Problem.speeds`` change its cuts.

    Returns:
        The decorator. The function has the algorithm's name, the arguments of :func:`prepare` and after
        them the algorithm's own, and the documentation of both.
    """

    def make(algorithm: Algorithm) -> BuiltIn:
        own = list(inspect.signature(algorithm).parameters.values())[1:]
        names = {option.name for option in own}

        def partition(costs: Sequence[float], num_stages: int, **options: Any) -> Plan:
            given = {name: options.pop(name) for name in names & options.keys()}
            return solve(made, prepare(costs, num_stages, **options), **given)

        shared = inspect.signature(prepare)
        for name in ("__module__", "__name__", "__qualname__"):
            setattr(partition, name, getattr(algorithm, name))
        partition.__doc__ = _documentation(algorithm)
        partition.__signature__ = shared.replace(  # type: ignore[attr-defined]
            parameters=[*shared.parameters.values(), *own], return_annotation="Plan"
        )
        made = cast(BuiltIn, partition)
        made.algorithm = algorithm
        made.capabilities = Capabilities(memory_caps, speeds, named=frozenset({*SHARED, *names}))
        return made

    return make


def solve(built_in: BuiltIn, problem: Problem, **options: Any) -> Plan:
    """Run a built-in partitioner on a prepared problem.

    Raises:
        InfeasiblePartitionError: It found no partition, or one that exceeds a cap.
    """
    refined = _refined(built_in.algorithm(problem, **options))
    problem.require_fit(refined.cuts, built_in.__name__)
    return problem.plan(refined.cuts, refined.rounds)


def cuts_of(built_in: BuiltIn, problem: Problem) -> list[int]:
    """Where a built-in partitioner cuts, for another one that starts from there; memory caps are not checked."""
    return list(_refined(built_in.algorithm(problem)).cuts)


def _refined(found: Cuts | Refined) -> Refined:
    return found if isinstance(found, Refined) else Refined(found, 0)


def capabilities_of(fn: Callable[..., Any]) -> Capabilities:
    """What a partitioner makes use of: as declared, or as its arguments say.

    Args:
        fn: A built-in partitioner, or a user's function. What it does not name, and does not take by
            ``**options`` either, it can't make use of.

    Returns:
        The capabilities.
    """
    declared = getattr(fn, "capabilities", None)
    if isinstance(declared, Capabilities):
        return declared
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # written in C, without a signature
        return Capabilities(named=frozenset(SHARED))
    named = {parameter.name for parameter in parameters}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        named |= set(SHARED)
    return Capabilities("memory" in named, "speeds" in named, frozenset(named))


def _documentation(algorithm: Algorithm) -> str:
    """The algorithm's text, with the arguments that all share and then its own."""
    text, _, own = inspect.cleandoc(algorithm.__doc__ or "").partition("\n\nArgs:\n    problem: The problem.\n")
    shared = inspect.cleandoc(prepare.__doc__ or "")
    arguments = shared.partition("\n\nArgs:\n")[2].partition("\n\nReturns:\n")[0]
    return (
        f"{text}\n\nArgs:\n{arguments}\n{own}".rstrip() + "\n\nReturns:\n    The plan.\n\nRaises:\n"
        "    InfeasiblePartitionError: Fewer layers than stages, or no partition within the caps was found.\n"
        "    ValueError: An argument is wrong; the message has the value and the rule."
    )
