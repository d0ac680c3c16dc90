"""Layers whose outputs can't be sent to another stage: no cut behind them.

The recorder sees what a layer returns while the next layer is on the same stage. Every profile says which layers it saw
return such a value, so that all ranks forbid the same cuts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch.distributed as dist

_SENT = "tensors, None, numbers and texts, in tuples, lists and dicts, are sent"


def agree_on_obstacles(
    layers: Collection[int], seen: Mapping[int, str], known: Mapping[int, str]
) -> dict[int, str]:
    """What layers return that can't be sent; collective over all ranks where one of them is new.

    Args:
        layers: that returned such a value, the same on every rank.
        seen: what this rank saw them return.
        known: what all ranks know already.
    """
    if set(layers) <= known.keys():
        return dict(known)
    everyone: list[dict[int, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(seen))
    return {layer: what for others in reversed(everyone) if others for layer, what in others.items()} | dict(known)


def obstructed_cuts(layers: Iterable[int], num_layers: int) -> set[int]:
    """Cuts behind layers whose outputs can't be sent; the last layer's goes to the loss."""
    return {layer + 1 for layer in layers} - {num_layers}


def check_cuts(boundaries: Sequence[int], obstacles: Mapping[int, str], names: Sequence[str]) -> None:
    """Refuse a partition that would send what can't be sent.

    Raises:
        ValueError: if it has such a cut.
    """
    for cut in boundaries[1:-1]:
        if 0 < cut < len(names) and (what := obstacles.get(cut - 1)) is not None:
            raise ValueError(
                f"the partition {tuple(boundaries)} cuts at {cut}, but layer {cut - 1} ({names[cut - 1]}) returns "
                f"{what}, which can't be sent to another stage; choose another cut, or let it return what can: {_SENT}"
            )


def cant_leave(what: str, *, stage: int, boundaries: Sequence[int], names: Sequence[str]) -> str:
    """Why a stage's outputs can't be sent."""
    cut = boundaries[stage + 1]
    who = f"layer {cut - 1} ({names[cut - 1]}) returns" if cut else "the data have"
    is_inside = 0 < cut < len(names)
    remedy = f"keep layers {cut - 1} and {cut} on one stage (pin=[{cut}])" if is_inside else "fill all stages"
    return (
        f"{who} {what}, which can't be sent from stage {stage} to the next; {remedy}, or let it return what "
        f"can: {_SENT}"
    )
