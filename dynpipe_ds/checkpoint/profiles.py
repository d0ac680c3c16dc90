"""Profiles in a checkpoint: a few tensors for all of them; sizes of layers, which rarely change, are kept once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import islice
from typing import Any

import torch

from dynpipe_ds.measure.profile import SECONDS, LayerProfile, PipelineProfile, StageProfile

_SIZES = [field.name for field in fields(LayerProfile) if field.name not in ("name", *SECONDS)]
_Sizes = tuple[tuple[Any, ...], ...]  # name and sizes of every layer, as LayerProfile has them


def pack(profiles: Sequence[PipelineProfile]) -> dict[str, Any]:
    """Plain values and tensors that :func:`unpack` reads back, equal.

    Args:
        profiles: of one model; stages may differ in number.
    """
    tables: dict[_Sizes, int] = {}
    table_of = [tables.setdefault(_sizes(profile), len(tables)) for profile in profiles]
    stages = [stage for profile in profiles for stage in profile.stages]
    is_split = any(layer.weight_s or layer.split_s for profile in profiles for layer in profile.layers)
    kept = SECONDS if is_split else SECONDS[:2]
    return {
        "batches": [profile.batch for profile in profiles],
        "boundaries": [profile.boundaries for profile in profiles],
        "num_micro_batches": [profile.num_micro_batches for profile in profiles],
        "seconds": torch.tensor(
            [[[getattr(layer, key) for key in kept] for layer in profile.layers] for profile in profiles],
            dtype=torch.float64,
        ),
        "names": [[layer[0] for layer in table] for table in tables],
        "sizes": torch.tensor([[layer[1:] for layer in table] for table in tables], dtype=torch.int64),
        "table_of": table_of,
        "num_stages": [len(profile.stages) for profile in profiles],
        "stage_seconds": torch.tensor(
            [(s.busy_s, s.fill_drain_s, s.waiting_s, s.step_s, s.batch_s) for s in stages], dtype=torch.float64
        ),
        "replicas_busy_s": [stage.replicas_busy_s for stage in stages],
        "stage_bytes": torch.tensor([stage.peak_memory_bytes for stage in stages], dtype=torch.int64),
        "link_s": [profile.link_s for profile in profiles],
    }


def unpack(packed: dict[str, Any]) -> list[PipelineProfile]:
    """The profiles that :func:`pack` was given."""
    names, sizes = packed["names"], packed["sizes"].tolist()
    seconds = packed["stage_seconds"].tolist()
    replicas_s = packed.get("replicas_busy_s", [()] * len(seconds))  # older checkpoints have none
    of_stages = zip(seconds, packed["stage_bytes"].tolist(), replicas_s, strict=True)
    stages = iter([(*times, num_bytes, busy_s) for times, num_bytes, busy_s in of_stages])
    profiles, links = [], packed.get("link_s", [()] * len(packed["table_of"]))  # older checkpoints have none
    for i, (table, seconds) in enumerate(zip(packed["table_of"], packed["seconds"].tolist(), strict=True)):
        profiles.append(PipelineProfile(
            batch=packed["batches"][i],
            boundaries=packed["boundaries"][i],
            num_micro_batches=packed["num_micro_batches"][i],
            layers=tuple(
                _layer(name, times, numbers)
                for name, times, numbers in zip(names[table], seconds, sizes[table], strict=True)
            ),
            stages=tuple(StageProfile(*stage) for stage in islice(stages, packed["num_stages"][i])),
            link_s=links[i],
        ))  # fmt: skip
    return profiles


def _layer(name: str, times: list[float], numbers: list[int]) -> LayerProfile:
    """A layer, with as many of its seconds as were kept."""
    found: dict[str, Any] = dict(zip(SECONDS, times, strict=False))
    return LayerProfile(name=name, **found, **dict(zip(_SIZES, numbers, strict=True)))


def _sizes(profile: PipelineProfile) -> _Sizes:
    return tuple((layer.name, *(getattr(layer, key) for key in _SIZES)) for layer in profile.layers)
