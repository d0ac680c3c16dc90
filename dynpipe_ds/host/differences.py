"""One warning at start about what keeps losses from being those of another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from dynpipe_ds.migration.compiled import compiled_parts, recipe_of, why_bits_differ
from dynpipe_ds.telling import warn


def warn_of_differences(engine: Any) -> None:
    """Say, once and on the first rank, which losses can't be compared; collective over all ranks."""
    seeded = bool(engine.module.seed_layers)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, None if seeded else _dropout(engine))
    reasons = [*(reason for reason in found if reason is not None)][:1]
    dist.all_gather_object(found, rounding_of_compiled(engine.local_layers()))
    reasons += [reason for reason in found if reason is not None][:1]
    if engine.gradient_clipping() > 0 and engine.num_stages > 1:
        reasons.append(_clipping(engine))
    if reasons and engine.global_rank == 0:
        warn("losses of this run may differ from those of another one: " + "; ".join(reasons))


def rounding_of_compiled(layers: Mapping[int, nn.Module]) -> str | None:
    """Why compiled layers may round otherwise after a move; ``None`` if none does, or none is compiled."""
    for index, layer in layers.items():
        for path, compiled in compiled_parts(layer):
            reason = why_bits_differ(recipe_of(compiled))
            if reason is not None:
                return f"{'.'.join(part for part in (f'layer {index}', path) if part)} is compiled with {reason}"
    return None


def _dropout(engine: Any) -> str | None:
    """What this stage says of dropout; ``None`` if it sees none."""
    where = find_dropout(engine.local_layers())
    return where and (
        f"{where} uses dropout, whose masks follow the cut and so differ after a "
        "move; pass seed_layers=True to the module to have the same masks for every cut"
    )


def find_dropout(layers: Mapping[int, nn.Module]) -> str | None:
    """The first module that drops, such as ``layer 3.drop (Dropout)``; ``None`` if there is none."""
    found = (f"{where} ({type(module).__name__})" for where, module in modules_of(layers) if dropout_rates(module))
    return next(found, None)


def modules_of(layers: Mapping[int, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """All modules in layers, each with its place, such as ``layer 3.drop``."""
    for index, layer in layers.items():
        for path, module in layer.named_modules():
            yield ".".join(part for part in (f"layer {index}", path) if part), module


def dropout_rates(module: nn.Module) -> dict[str, float]:
    """Rates > 0 that a module, not its children, drops by: ``p`` of a ``...Dropout``, ``...dropout...`` of others."""
    rates = {k: v for k, v in vars(module).items() if "dropout" in k.lower()}
    if "Dropout" in type(module).__name__:
        rates["p"] = getattr(module, "p", 0.0)
    return {k: rate for k, rate in rates.items() if isinstance(rate, float) and rate > 0}


def _clipping(engine: Any) -> str:
    if engine.optimizer is engine.basic_optimizer:
        norm, compared = "the norm of all stages, where DeepSpeed's own pipeline counts the first stage only", "compare"
    else:
        norm = "a norm that is the same for every cut, where DeepSpeed's own is rounded otherwise"
        compared = "compare bits"
    return (
        f"gradients are clipped at {engine.gradient_clipping()} by {norm}; to {compared} with DeepSpeed set "
        '"gradient_clipping": 0, or compare with a run of this library that never moves ("rebalance_every": "never")'
    )
