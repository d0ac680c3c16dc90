"""What a training batch cost, layer by layer and stage by stage: a value, the same on every rank.

A layer's times belong to the layer, not to the stage it happened to live on, so profiles of
batches that ran with different boundaries can be combined.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from operator import index
from os import PathLike
from pathlib import Path
from typing import Any, Literal, cast

from dynpipe_ds.measure.loads import imbalance
from dynpipe_ds.placement import Placement

FORMAT = "dynpipe_ds.profile"
FORMAT_VERSION = 1  # raised when a key of the saved profile changes its meaning

EMA_FACTOR = 0.5  # weight of the newest batch in 'ema': the last three then make 7/8
Cost = Literal["time", "parameters"]
Smoothing = Literal["median", "mean", "ema", "least"]
SECONDS = ("forward_s", "backward_s", "weight_s", "split_s")  # of a layer


def _check_fields(value: LayerProfile | StageProfile | PipelineProfile, what: str) -> None:
    """Refuse a number that is not finite, negative or of the wrong type, naming its field."""
    for name, kind in _kinds(cast(Hashable, type(value))):
        item = getattr(value, name)
        if kind == "str" and not isinstance(item, str):
            raise ValueError(f"{what}: {name} = {item!r}: must be text")
        if kind == "int" and not (type(item) is int and item >= 0):
            raise ValueError(f"{what}: {name} = {item!r}: must be a whole number >= 0")
        is_number = isinstance(item, float) or type(item) is int
        if kind == "float" and not (is_number and 0 <= item < math.inf):  # nan fails too
            raise ValueError(f"{what}: {name} = {item!r}: must be finite seconds >= 0")


@cache
def _kinds(cls: Hashable) -> list[tuple[str, Any]]:
    """Names and types of a class's fields; asked for every layer of every profile."""
    return [(field.name, field.type) for field in fields(cast(type[LayerProfile], cls))]


@dataclass(frozen=True)
class LayerProfile:
    """One layer of the model.

    Args:
        name: what to call the layer in messages and plots.
        forward_s: mean forward seconds of one micro-batch.
        backward_s: mean backward seconds of one micro-batch, with recomputation when activation
            checkpointing is on; 0 for a layer without backward. Of a batch with whole and split backwards, as measured,
            those of the whole ones.
        num_parameters: number of parameter elements.
        parameter_bytes: bytes of the parameters.
        gradient_bytes: bytes of the gradients that the layer keeps between micro-batches.
        optimizer_state_bytes: bytes of the optimizer's state, master weights included.
        activation_bytes: bytes that one micro-batch holds from forward until backward.
        weight_s: of a backward in two halves, the second one's seconds, which compute gradients of weights and may be
            done later; 0 where all ran whole.
        split_s: seconds that both halves together take longer than ``backward_s``; 0 where all backwards were split.

    Raises:
        ValueError: for a negative or non-finite number.
    """

    name: str
    forward_s: float
    backward_s: float
    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_state_bytes: int
    activation_bytes: int
    weight_s: float = 0.0
    split_s: float = 0.0

    def __post_init__(self) -> None:
        _check_fields(self, f"layer {self.name!r}")

    @property
    def seconds(self) -> float:
        """Forward and backward seconds of one micro-batch."""
        return self.forward_s + self.backward_s

    @property
    def state_bytes(self) -> int:
        """Bytes that a stage holds for it all the time: parameters, gradients, optimizer state."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_state_bytes


@dataclass(frozen=True)
class StageProfile:
    """One stage during one batch.

    Args:
        busy_s: seconds computing forward and backward passes.
        fill_drain_s: idle seconds that the schedule itself costs, even in perfect balance.
        waiting_s: idle seconds waiting for a slower neighbour.
        step_s: seconds of gradient reduction and optimizer step.
        batch_s: seconds of the whole batch.
        peak_memory_bytes: most bytes allocated during the batch.
        replicas_busy_s: ``busy_s`` of each of R data-parallel replicas, of which the other seconds are means; empty
            where there is one.

    Raises:
        ValueError: for a negative or non-finite number.
    """

    busy_s: float
    fill_drain_s: float
    waiting_s: float
    step_s: float
    batch_s: float
    peak_memory_bytes: int
    replicas_busy_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicas_busy_s", tuple(self.replicas_busy_s))
        _check_fields(self, "stage")
        if not all(0 <= seconds < math.inf for seconds in self.replicas_busy_s):
            raise ValueError(f"stage: replicas_busy_s = {self.replicas_busy_s}: must be finite seconds >= 0")

    @property
    def idle_s(self) -> float:
        """Idle seconds of the batch: fill and drain, and waiting."""
        return self.fill_drain_s + self.waiting_s

    @property
    def bubble_ratio(self) -> float:
        """Share of idle time, idle / (idle + busy); 0 when the stage did nothing at all."""
        total_s = self.idle_s + self.busy_s
        return self.idle_s / total_s if total_s else 0.0


@dataclass(frozen=True)
class PipelineProfile:
    """The whole pipeline during one batch (or, smoothed, during several).

    Args:
        batch: number of the (newest) batch, counted from 0.
        boundaries: S+1 layer indices, ``boundaries[s] <= layer < boundaries[s+1]`` on stage s;
            empty when no partition exists yet.
        num_micro_batches: M.
        layers: L layers.
        stages: S stages; empty when nothing has run yet.
        link_s: seconds of a message over each of the S - 1 boundaries; ``None`` where that was not measured. Empty when
            nothing has run yet.

    Raises:
        ValueError: when boundaries, layers and stages don't fit together.
    """

    batch: int
    boundaries: tuple[int, ...]
    num_micro_batches: int
    layers: tuple[LayerProfile, ...]
    stages: tuple[StageProfile, ...]
    link_s: tuple[float | None, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(index(cut) for cut in self.boundaries))
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "stages", tuple(self.stages))
        object.__setattr__(self, "link_s", tuple(self.link_s))
        _check_fields(self, "profile")
        if self.num_micro_batches < 1:
            raise ValueError(f"profile: num_micro_batches = {self.num_micro_batches}: must be >= 1")
        if self.boundaries:
            Placement.from_boundaries(self.boundaries, num_layers=len(self.layers))
        if self.stages and len(self.boundaries) != len(self.stages) + 1:
            raise ValueError(
                f"profile: boundaries = {self.boundaries} name {len(self.boundaries) - 1} stages, "
                f"but there are {len(self.stages)} stage profiles"
            )

        if self.link_s and len(self.boundaries) != len(self.link_s) + 2:
            raise ValueError(
                f"profile: link_s has {len(self.link_s)} seconds: need one for each boundary between stages of "
                f"{self.boundaries}"
            )
        for seconds in self.link_s:
            if seconds is not None and not 0 <= seconds < math.inf:
                raise ValueError(f"profile: link_s = {self.link_s}: must be finite seconds >= 0, or null")

    @property
    def placement(self) -> Placement:
        """Which stage held each layer, the boundaries as a value.

        Raises:
            ValueError: when no partition exists yet.
        """
        return Placement.from_boundaries(self.boundaries, num_layers=len(self.layers))

    @property
    def bubble_ratio(self) -> float:
        """Measured bubble ratio, mean over the stages; 0 when nothing has run yet."""
        ratios = [stage.bubble_ratio for stage in self.stages]
        return statistics.fmean(ratios) if ratios else 0.0

    @property
    def imbalance(self) -> float:
        """Imbalance of the stages' measured loads, :func:`~dynpipe_ds.measure.imbalance`; 0 when nothing has run yet.

        A stage's load is the seconds that it computed in the batch; with replicas, their mean.
        """
        return imbalance([stage.busy_s for stage in self.stages])

    def costs(self, cost: Cost = "time") -> list[float]:
        """Cost of every layer, for a partitioner.

        Args:
            cost: ``"time"`` for seconds of one micro-batch, ``"parameters"`` for their number.

        Returns:
            L numbers.

        Raises:
            ValueError: for any other word.
        """
        if cost == "time":
            return [layer.seconds for layer in self.layers]
        if cost == "parameters":
            return [float(layer.num_parameters) for layer in self.layers]
        raise ValueError(f"cost = {cost!r}: must be 'time' or 'parameters'")

    def state_bytes(self) -> list[int]:
        """Bytes of every layer that a stage holds all the time, gradients included."""
        return [layer.state_bytes for layer in self.layers]

    def moved_bytes(self) -> list[int]:
        """Bytes of every layer that travel when it moves; gradients are empty between batches."""
        return [layer.parameter_bytes + layer.optimizer_state_bytes for layer in self.layers]

    def activation_bytes(self) -> list[int]:
        """Bytes of every layer that one micro-batch in flight holds."""
        return [layer.activation_bytes for layer in self.layers]

    def stage_seconds(
        self,
        boundaries: Placement | Sequence[int] | None = None,
        *,
        speeds: Sequence[float] | None = None,
    ) -> list[float]:
        """Forward and backward seconds of one micro-batch on every stage.

        Args:
            boundaries: S+1 layer indices, or any placement; ``None``: the profile's own.
            speeds: S relative speeds to divide by, when layer times are :meth:`at_unit_speed`.

        Returns:
            S numbers.

        Raises:
            ValueError: when there are no boundaries, or they don't cover the layers.
        """
        placement = self.placement if boundaries is None else Placement.of(boundaries, num_layers=len(self.layers))
        sums = [math.fsum(costs) for costs in placement.by_stage(self.costs("time"))]
        return sums if speeds is None else [s / v for s, v in zip(sums, speeds, strict=True)]

    def at_unit_speed(self, speeds: Sequence[float]) -> PipelineProfile:
        """Convert layer times, measured on workers of unequal speed, to a worker of speed 1.

        Args:
            speeds: S relative speeds of the workers that ran this batch.

        Returns:
            The profile with the times of a stage's layers multiplied by its speed.

        Raises:
            ValueError: when the profile has no boundaries or another number of stages.
        """
        if len(speeds) != len(self.boundaries) - 1:
            raise ValueError(
                f"speeds = {list(speeds)}: need one for each stage of boundaries {self.boundaries}"
            )
        by_layer = [speeds[stage] for stage in self.placement.layer_stages]
        return self.with_seconds(**{
            name: [getattr(layer, name) * speed for layer, speed in zip(self.layers, by_layer, strict=True)]
            for name in SECONDS
        })  # fmt: skip

    def with_seconds(self, **seconds: Sequence[float]) -> PipelineProfile:
        """The same batch if layers had taken other seconds.

        Args:
            seconds: of each layer, by the name of the field: ``forward_s``, ``backward_s``, ``weight_s``, ``split_s``.

        Returns:
            The profile; what is not named stays.

        Raises:
            ValueError: for another name, another number of layers, or seconds that are negative or not finite.
        """
        for name, values in seconds.items():
            if name not in SECONDS:
                raise ValueError(f"{name}: must be one of {', '.join(SECONDS)}")
            if len(values) != len(self.layers):
                raise ValueError(f"{name} has {len(values)} seconds: need one for each of {len(self.layers)} layers")
            if not all(0 <= value < math.inf for value in values):
                raise ValueError(f"{name} = {list(values)}: must be finite seconds >= 0")
        if not seconds:
            return self
        layers = []
        for layer, values in zip(self.layers, zip(*seconds.values(), strict=True), strict=True):
            changed = object.__new__(LayerProfile)  # all else was checked: a decision makes thousands of layers
            changed.__dict__.update(layer.__dict__)
            changed.__dict__.update(zip(seconds, values, strict=True))
            layers.append(changed)
        return replace(self, layers=tuple(layers))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the profile as JSON; :meth:`load` reads it back, equal.

        Args:
            path: file to write; an existing one is replaced.
        """
        Path(path).write_text(self.dumps(indent=1) + "\n", encoding="utf-8")

    def dumps(self, indent: int | None = None) -> str:
        """Return JSON text that :meth:`loads` reads back, equal.

        Args:
            indent: spaces by level; ``None`` for one line.
        """
        data = {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
        return json.dumps(data, indent=indent, allow_nan=False)

    @classmethod
    def loads(cls, text: str) -> PipelineProfile:
        """Read what :meth:`dumps` wrote.

        Args:
            text: JSON text.

        Returns:
            The profile.

        Raises:
            ValueError: for anything else.
        """
        return _from_json(json.loads(text))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> PipelineProfile:
        """Read a profile that :meth:`save` wrote.

        Args:
            path: the JSON file.

        Returns:
            The profile.

        Raises:
            FileNotFoundError: when there is no such file.
            ValueError: for anything missing, unknown or impossible, by file and layer or stage.
        """
        file = Path(path)
        if not file.is_file():
            raise FileNotFoundError(
                f"profile {file}: no such file; write one with PipelineProfile.save(path)"
            )
        try:
            return cls.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"profile {file}: not a valid profile: {error}") from error


def smooth(
    profiles: Sequence[PipelineProfile],
    how: Smoothing = "median",
    *,
    speeds: Sequence[float] | None = None,
) -> PipelineProfile:
    """Combine the layer times of several batches.

    Boundaries may differ between batches: layer times are global. All but them is the newest's.

    Args:
        profiles: one or more, oldest first.
        how: ``"median"`` (not moved by a single odd batch), ``"mean"``, or ``"ema"``, the
            exponential moving average with :data:`EMA_FACTOR`; or ``"least"``.
        speeds: S relative speeds; every batch is then first converted :meth:`at_unit_speed
            <PipelineProfile.at_unit_speed>`.

    Returns:
        The combined profile.

    Raises:
        ValueError: for no profiles, another word, or profiles of different models.
    """
    if not profiles:
        raise ValueError("profiles = []: need at least one to smooth")
    if how not in _COMBINE:
        raise ValueError(f"how = {how!r}: must be one of {', '.join(map(repr, _COMBINE))}")
    counts = [len(profile.layers) for profile in profiles]
    if len(set(counts)) > 1:
        raise ValueError(f"profiles have {counts} layers: all must come from the same model")
    if speeds is not None:
        profiles = [profile.at_unit_speed(speeds) for profile in profiles]
    combine, by_layer = _COMBINE[how], list(zip(*(profile.layers for profile in profiles), strict=True))
    return profiles[-1].with_seconds(**{
        name: [combine([getattr(layer, name) for layer in same]) for same in by_layer] for name in SECONDS
    })  # fmt: skip


def _ema(values: Sequence[float]) -> float:
    average = values[0]
    for value in values[1:]:
        average += EMA_FACTOR * (value - average)
    return average


_COMBINE: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "mean": statistics.fmean,
    "ema": _ema,
    "least": min,
}


def _from_json(data: object) -> PipelineProfile:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError(f'must have "format": "{FORMAT}"')
    if data.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"version = {data.get('version')!r}: this release reads version {FORMAT_VERSION}; "
            f"record the profile again"
        )
    body = {key: value for key, value in data.items() if key not in ("format", "version")}
    _check_keys(PipelineProfile, body, "profile")
    for key in ("boundaries", "layers", "stages", "link_s"):
        if not isinstance(body.get(key, []), list):
            raise ValueError(f"{key} = {body[key]!r}: must be a list")
    if any(type(cut) is not int for cut in body["boundaries"]):
        raise ValueError(f"boundaries = {body['boundaries']}: must be whole numbers")
    for key, cls in (("layers", LayerProfile), ("stages", StageProfile)):
        body[key] = [_build(cls, raw, f"{key}[{i}]") for i, raw in enumerate(body[key])]
    return PipelineProfile(**body)


def _build(cls: type[LayerProfile | StageProfile], raw: Any, where: str) -> object:
    """One layer or stage out of its JSON object; errors name its position."""
    _check_keys(cls, raw, where)
    try:
        return cls(**raw)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _check_keys(cls: type[Any], raw: object, where: str) -> None:
    if not isinstance(raw, dict):
        raise ValueError(f"{where} must be a JSON object, not {type(raw).__name__}")
    known = [field.name for field in fields(cls)]
    needed = [field.name for field in fields(cls) if field.default is MISSING]  # those added later have defaults
    for word, keys in (
        ("missing", [key for key in needed if key not in raw]),
        ("unknown", [key for key in raw if key not in known]),
    ):
        if keys:
            raise ValueError(f"{where}: {word} {', '.join(keys)}")
