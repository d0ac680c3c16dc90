"""What finer layers would bring: a profile with each of the layers that repeat in two equal halves."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields, replace

from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile

LEAST_GAIN = 0.03
"""Share of a batch from which on it is worth saying."""


def repeated(profile: PipelineProfile) -> str | None:
    """What the layers are called that most of the model consists of, numbers left out; ``None``: there are none.

    Args:
        profile: of any partition.
    """
    [(kind, count)] = Counter(_kind(layer) for layer in profile.layers).most_common(1)
    return kind if 2 * count > len(profile.layers) else None


def halved(profile: PipelineProfile) -> PipelineProfile:
    """The same model with its repeated layers cut into two equal halves.

    Args:
        profile: of layers that repeat.
    """
    kind, layers, starts = repeated(profile), list[LayerProfile](), [0]
    for layer in profile.layers:
        layers += _halves(layer) if _kind(layer) == kind else [layer]
        starts.append(len(layers))
    boundaries = tuple(starts[cut] for cut in profile.boundaries)
    return replace(profile, layers=tuple(layers), boundaries=boundaries)


def _kind(layer: LayerProfile) -> str:
    return re.sub(r"[\W\d_]+", " ", layer.name).strip()


def _halves(layer: LayerProfile) -> list[LayerProfile]:
    values = {field.name: getattr(layer, field.name) for field in fields(layer) if field.name != "name"}
    first = {name: value / 2 if isinstance(value, float) else value // 2 for name, value in values.items()}
    second = {name: values[name] - first[name] for name in values}
    return [LayerProfile(layer.name, **half) for half in (first, second)]
