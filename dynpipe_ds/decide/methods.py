"""What a user may pass as ``partition_method``, and how it becomes boundaries.

The same object is asked at construction, where times are not known yet, and at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.measure.profile import Cost, LayerProfile, PipelineProfile
from dynpipe_ds.partition import (
    Plan,
    StageMemory,
    check_boundaries,
    get_partitioner,
    partitioner_names,
    plan_from_boundaries,
    run_partitioner,
)
from dynpipe_ds.simulation.workload import links_s

COSTS: tuple[Cost, ...] = ("time", "parameters")
DEEPSPEED_NAMES = ("uniform", "parameters", "type:<regex>")


@dataclass(frozen=True)
class PartitionMethod:
    """One way of choosing stage boundaries.

    Exactly one of the fields below is set (``partitioner`` comes with ``cost``).

    Attributes:
        deepspeed_name: a method that DeepSpeed itself carries out; gives the first partition only.
        boundaries: explicit boundaries; gives the first partition only.
        function: ``(profile, num_stages) -> boundaries``.
        partitioner: name of a registered partitioner.
        cost: what it balances, ``"time"`` or ``"parameters"``.
    """

    deepspeed_name: str | None = None
    boundaries: tuple[int, ...] | None = None
    function: Callable[[PipelineProfile, int], Any] | None = None
    partitioner: str | None = None
    cost: Cost | None = None

    @classmethod
    def parse(cls, method: Any) -> PartitionMethod:
        """Understand a ``partition_method`` argument.

        Raises:
            ValueError: if it is none of these, naming the choices.
        """
        if isinstance(method, cls):
            return method
        if callable(method):
            return cls(function=method)
        if isinstance(method, str):
            return cls._parse_name(method)
        if isinstance(method, Sequence) or hasattr(method, "tolist"):
            return cls(boundaries=tuple(int(b) for b in method))
        raise ValueError(f"partition_method {method!r} is not {_choices()}")

    @classmethod
    def _parse_name(cls, name: str) -> PartitionMethod:
        lowered = name.lower()
        if lowered in ("uniform", "parameters") or lowered.startswith("type:"):
            return cls(deepspeed_name=name)
        if lowered == "profile":
            return cls(partitioner="optimal", cost="time")
        partitioner, colon, cost = name.partition(":")
        for known in COSTS:
            if colon and partitioner in partitioner_names() and cost == known:
                return cls(partitioner=partitioner, cost=known)
        raise ValueError(f"partition_method {name!r} is not {_choices()}")

    @property
    def is_deepspeed(self) -> bool:
        """Whether DeepSpeed's own code carries it out."""
        return self.deepspeed_name is not None

    @property
    def is_start_only(self) -> bool:
        """Whether it only says where to start, so that the JSON section decides at run time."""
        return self.is_deepspeed or self.boundaries is not None

    @property
    def needs_parameters(self) -> bool:
        """Whether the first partition needs parameter counts (each layer is then built once)."""
        return self.boundaries is None and self.partitioner != "uniform"

    def plan(
        self,
        profile: PipelineProfile,
        num_stages: int,
        *,
        current: Sequence[int] | None = None,
        pinned: Sequence[int] = (),
        memory: StageMemory | None = None,
        speeds: Sequence[float] | None = None,
        allow_empty: bool = False,
    ) -> Plan:
        """Choose boundaries for a profile; parameter counts stand in for times that it lacks.

        Returns:
            The checked plan.

        Raises:
            ValueError: if a callable's or the user's boundaries break a rule.
        """
        costs = _known_costs(profile, self.cost or "time")
        layer_bytes, link_s = profile.moved_bytes(), links_s(profile, num_stages)
        if self.partitioner is not None:
            return run_partitioner(
                get_partitioner(self.partitioner), costs, num_stages, profile=profile, current=current,
                layer_bytes=layer_bytes, memory=memory, pinned=pinned, speeds=speeds, allow_empty=allow_empty,
                activation_link_s=link_s, gradient_link_s=link_s,
            )
        chosen: Any = self.boundaries if self.function is None else self.function(profile, num_stages)
        boundaries = check_boundaries(
            chosen, num_layers=len(costs), num_stages=num_stages, pinned=pinned, allow_empty=allow_empty
        )
        return plan_from_boundaries(
            boundaries, costs, current=current, layer_bytes=layer_bytes, speeds=speeds
        )

    @property
    def seeks_best(self) -> bool:
        """Whether it is to find the fastest partition, rather than one by a rule of its own."""
        return self.partitioner == "optimal" and self.cost == "time"

    def replan(
        self, plan: Plan, boundaries: Sequence[int], profile: PipelineProfile, *, current: Sequence[int],
        speeds: Sequence[float] | None,
    ) -> Plan:
        """A plan with other boundaries, which are the best for another order than 1F1B.

        Args:
            plan: the method's.
            boundaries: S + 1 layer indices.
            profile: that it was made from.
            current: the present boundaries.
            speeds: S relative speeds.
        """
        if tuple(boundaries) == plan.boundaries:
            return plan
        return plan_from_boundaries(
            tuple(boundaries), _known_costs(profile, self.cost or "time"), current=current,
            layer_bytes=profile.moved_bytes(), speeds=speeds,
        )

    def __str__(self) -> str:
        if self.partitioner is not None:
            return f"{self.partitioner}:{self.cost}"
        if self.function is not None:
            return getattr(self.function, "__name__", repr(self.function))
        return self.deepspeed_name or str(list(self.boundaries or ()))


def _known_costs(profile: PipelineProfile, cost: Cost) -> list[float]:
    costs = list(profile.costs(cost))
    if not any(costs):
        costs = list(profile.costs("parameters"))
    return costs if any(costs) else [1.0] * len(costs)


def _choices() -> str:
    return (
        f"one of DeepSpeed's {', '.join(DEEPSPEED_NAMES)}; 'profile'; '<partitioner>:<cost>' with "
        f"partitioner {', '.join(partitioner_names())} and cost {', '.join(COSTS)}; a list of boundaries; "
        "or a callable (profile, num_stages) -> boundaries"
    )


def profile_from_parameters(
    num_parameters: Sequence[int], *, names: Sequence[str], num_stages: int
) -> PipelineProfile:
    """Stand-in profile for construction, where nothing was measured yet."""
    layers = tuple(
        LayerProfile(
            name=name, forward_s=0.0, backward_s=0.0, num_parameters=int(count), parameter_bytes=0,
            gradient_bytes=0, optimizer_state_bytes=0, activation_bytes=0,
        )
        for name, count in zip(names, num_parameters, strict=True)
    )
    even = tuple(round(s * len(layers) / num_stages) for s in range(num_stages + 1))
    return PipelineProfile(batch=0, boundaries=even, num_micro_batches=1, layers=layers, stages=())


def method_at_run_time(config: DynamicPipelineConfig, chosen: PartitionMethod | None) -> PartitionMethod:
    """What to call at run time: the module's choice, or the section's where that only says the start.

    Raises:
        ValueError: if module and section ask for different things.
    """
    from_section = PartitionMethod.parse(f"{config.partitioner or 'optimal'}:{config.cost or 'time'}")
    if chosen is None or chosen.is_start_only:
        return from_section
    if config.partitioner not in (None, chosen.partitioner) or config.cost not in (None, chosen.cost):
        raise ValueError(
            f"the module's partition_method is {chosen} but the dynamic_pipeline section asks for "
            f"{from_section}; remove one of the two"
        )
    return chosen
