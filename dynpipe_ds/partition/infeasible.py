"""Why no partition fits into the memory caps."""

from __future__ import annotations

from dynpipe_ds.partition.problem import Problem

_REMEDY = (
    "raise the memory cap, use more stages, or need less memory a layer "
    "(activation checkpointing, smaller micro-batches)"
)


def explain(problem: Problem) -> str:
    """Say what stands against the caps: one layer, the total, or the way they lie."""
    return _single_group(problem) or _total(problem)


def _single_group(problem: Problem) -> str | None:
    for k in range(problem.num_groups):
        needs = [problem.stage_bytes(stage, k, k + 1) for stage in range(problem.num_stages)]
        over = [need - cap for need, cap in zip(needs, problem.caps, strict=False)]
        if min(over) > 0:
            stage = over.index(min(over))
            first, end = problem.starts[k], problem.starts[k + 1] - 1
            name = f"layer {first}" if first == end else f"pinned layers {first} to {end}"
            return (
                f"{name} alone: {needs[stage]:,} bytes on stage {stage}, where the least is "
                f"missing ({problem.state[k + 1] - problem.state[k]:,} of state and "
                f"{problem.activation[k + 1] - problem.activation[k]:,} of activations times "
                f"{problem.in_flight[stage]} micro-batches in flight), exceed the cap of "
                f"{problem.caps[stage]:,} bytes; {_REMEDY}"
            )
    return None


def _total(problem: Problem) -> str:
    least = problem.state[-1] + min(problem.in_flight) * problem.activation[-1]
    room = sum(problem.caps)
    numbers = (
        f"all layers need at least {least:,} bytes in total (each micro-batch's activations "
        f"counted {min(problem.in_flight)} time), the caps of {problem.num_stages} stages add up "
        f"to {room:,}"
    )
    if least > room:
        return f"{numbers}; {_REMEDY}"
    return (
        f"no contiguous partition keeps the memory caps: {numbers}, but early stages hold the "
        f"activations of up to {max(problem.in_flight)} micro-batches; {_REMEDY}"
    )
