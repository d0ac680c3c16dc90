"""Complete state of parameters whose flat buffers replicas share out, put together.

Moves do without it. Replacing a parameter needs it, since the user's function maps whole tensors; so does who looks at
the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynpipe_ds.host.optimizers.groups import State
from dynpipe_ds.ranks.agreement import together

BUCKET_ELEMENTS = 2**22
"""Elements of parameters whose state replicas put together in one message; bounds what that needs at a time."""

Source = tuple[Any, Any, State]  # a parameter's fragment, its replicas, and the state of the flat buffer that has it


def full_states(sources: Mapping[nn.Parameter, Source]) -> Iterator[tuple[nn.Parameter, State]]:
    """Complete state of parameters; collective over replicas. Without any it shares memory with the flat buffers."""
    bucket: list[nn.Parameter] = []
    for parameter, (_, group, _) in sources.items():
        is_full = sum(p.numel() for p in bucket) >= BUCKET_ELEMENTS
        if bucket and (is_full or sources[bucket[0]][1] is not group):
            yield from _whole(bucket, sources).items()
            bucket = []
        bucket.append(parameter)
    if bucket:
        yield from _whole(bucket, sources).items()


def _whole(parameters: Sequence[nn.Parameter], sources: Mapping[nn.Parameter, Source]) -> dict[nn.Parameter, State]:
    """Complete state of parameters with the same replicas, put together from their fragments in one message."""
    group, device = sources[parameters[0]][1], parameters[0].device
    if dist.get_world_size(group) == 1:
        states, shares = fragments(parameters, sources)
        for parameter, key, share in shares:
            states[parameter][key] = share
        return states
    states, bits = together(lambda: _own_bits(parameters, sources, device), device, RuntimeError, group)
    dist.all_reduce(bits, group=group)
    return states


def fragments(
    parameters: Sequence[nn.Parameter], sources: Mapping[nn.Parameter, Source]
) -> tuple[dict[nn.Parameter, State], list[tuple[nn.Parameter, str, Tensor | None]]]:
    """What of the parameters' state has no elements; this rank's fragments of all else."""
    states: dict[nn.Parameter, State] = {}
    shares: list[tuple[nn.Parameter, str, Tensor | None]] = []
    for parameter in parameters:
        mapping, _, flat_state = sources[parameter]
        states[parameter] = {key: value for key, value in flat_state.items() if not is_moment(value)}
        # Not mapping.optim_fragment: ZeRO links it after the first group's first step, when the
        # other groups have no state yet, and never again.
        shares.append((parameter, "master", mapping and mapping.hp_fragment.detach()))
        moments = ((key, value) for key, value in flat_state.items() if is_moment(value))
        shares += [(parameter, key, mapping and _fragment(value, mapping)) for key, value in moments]
    return states, shares


def _own_bits(
    parameters: Sequence[nn.Parameter], sources: Mapping[nn.Parameter, Source], device: torch.device
) -> tuple[dict[nn.Parameter, State], Tensor]:
    """States whose tensors lie in one row of bits, and that row with this rank's fragments in it.

    One replica has an element's bits, the others add zero to them: exact, also for a zero with a sign.
    """
    states, shares = fragments(parameters, sources)
    bits = torch.zeros(sum(p.numel() for p, _, _ in shares), dtype=torch.int32, device=device)
    start = 0
    for parameter, key, share in shares:
        place = bits[start : start + parameter.numel()]
        if share is not None:
            address = sources[parameter][0].lp_fragment_address
            place.narrow(0, address.start, address.numel).copy_(share.float().view(torch.int32))
        states[parameter][key] = place.view(torch.float32)
        start += parameter.numel()
    return states, bits


def is_moment(value: Any) -> bool:
    """Whether a flat buffer's state has a value an element, not a count of steps or the like."""
    return isinstance(value, Tensor) and value.numel() > 1


def _fragment(flat: Tensor, mapping: Any) -> Tensor:
    address = mapping.hp_fragment_address
    return flat.detach().narrow(0, address.start, address.numel)
