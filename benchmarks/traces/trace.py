"""The trace format: per-layer seconds and bytes over training, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dynpipe_ds import LayerProfile, PipelineProfile

FORMAT = "dynpipe_ds.trace"
FORMAT_VERSION = 1  # raised when a key changes its meaning
KINDS = ("cpu", "gpu", "model")


@dataclass(frozen=True)
class Source:
    """Where a trace's numbers are from.

    Args:
        kind: ``"cpu"`` or ``"gpu"`` for a recorded run, ``"model"`` for equations.
        description: the run (device, versions, command, what else the machine did) or the equations and
            their papers, with what is assumed.
        seed: of what is drawn at random; -1 for nothing.
    """

    kind: str
    description: str
    seed: int = -1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"source: kind = {self.kind!r}: must be one of {', '.join(KINDS)}")
        if not self.description.strip():
            raise ValueError("source: description is empty: say where the numbers are from")


@dataclass(frozen=True)
class TraceBatch:
    """All layers from one batch on, until the next ``TraceBatch``.

    Args:
        batch: number of the batch, counted from 0.
        forward_s: L forward seconds of a micro-batch.
        backward_s: L backward seconds of a micro-batch.
        parameter_bytes: L bytes of parameters that are left.
        frozen_layers: leading layers that are frozen: no backward, and no gradient into them.
        dispersion: L standard deviations of a layer's seconds among the micro-batches of a batch, relative
            to their mean; empty for none.
    """

    batch: int
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    frozen_layers: int = 0
    dispersion: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s", "parameter_bytes", "dispersion"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
            values = getattr(self, name)
            if any(not (isinstance(v, (int, float)) and math.isfinite(v) and v >= 0) for v in values):
                raise ValueError(f"batch {self.batch}: {name} must be finite numbers >= 0")
        counts = {len(self.forward_s), len(self.backward_s), len(self.parameter_bytes)}
        if len(counts) != 1 or (self.dispersion and len(self.dispersion) not in counts):
            raise ValueError(f"batch {self.batch}: its lists have different lengths: one number for each layer")
        if not 0 <= self.frozen_layers <= len(self.forward_s):
            raise ValueError(f"batch {self.batch}: frozen_layers = {self.frozen_layers} of {len(self.forward_s)}")
        if any(self.backward_s[: self.frozen_layers]):
            raise ValueError(f"batch {self.batch}: the {self.frozen_layers} frozen layers must have no backward")

    @property
    def seconds(self) -> tuple[float, ...]:
        """L forward and backward seconds of a micro-batch."""
        return tuple(f + b for f, b in zip(self.forward_s, self.backward_s, strict=True))


@dataclass(frozen=True)
class Trace:
    """A training run as its layers' seconds and bytes.

    Args:
        name: scenario and depth, for tables.
        source: where the numbers are from.
        layers: name of every layer.
        num_batches: length of the run; :meth:`at` scales it to other lengths.
        batches: rising, the first one 0.

    Raises:
        ValueError: when the parts don't fit together.
    """

    name: str
    source: Source
    layers: tuple[str, ...]
    num_batches: int
    batches: tuple[TraceBatch, ...] = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        object.__setattr__(self, "batches", tuple(self.batches))
        numbers = [batch.batch for batch in self.batches]
        if not numbers or numbers[0] != 0 or numbers != sorted(set(numbers)) or numbers[-1] >= self.num_batches:
            raise ValueError(
                f"trace {self.name}: batches are numbered {numbers[:4]}...: must rise from 0 and stay below "
                f"num_batches = {self.num_batches}"
            )
        wrong = [b.batch for b in self.batches if len(b.forward_s) != len(self.layers)]
        if wrong:
            raise ValueError(f"trace {self.name}: batch {wrong[0]} does not have {len(self.layers)} layers")

    def at(self, batch: int, num_batches: int | None = None) -> TraceBatch:
        """What holds in a batch of a run that is shorter or longer than the trace.

        Args:
            batch: number of the batch in that run, counted from 0.
            num_batches: length of that run; None: the trace's own.
        """
        length = num_batches or self.num_batches
        here = batch * self.num_batches // length
        return max((b for b in self.batches if b.batch <= here), key=lambda b: b.batch)

    def scaled(self, factor: float) -> Trace:
        """All seconds times a factor; bytes stay.

        Args:
            factor: above 0.
        """
        batches = (
            replace(
                b, forward_s=tuple(factor * s for s in b.forward_s), backward_s=tuple(factor * s for s in b.backward_s)
            )
            for b in self.batches
        )
        return replace(self, batches=tuple(batches))

    def mean_layer_s(self) -> float:
        """Forward and backward seconds of a mean layer in the first batch; halves of a block count as one."""
        return math.fsum(self.batches[0].seconds) / sum(not name.endswith(".mlp") for name in self.layers)

    def save(self, path: str | Path) -> Path:
        """Write JSON that :meth:`load` reads back, equal.

        Args:
            path: file to write; missing folders are made.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT, "version": FORMAT_VERSION} | {k: v for k, v in asdict(self).items() if k != "batches"}
        rows = ",\n  ".join(json.dumps(asdict(batch)) for batch in self.batches)
        text = json.dumps(head, indent=1)[:-2] + f',\n "batches": [\n  {rows}\n ]\n}}\n'
        target.write_text(text, encoding="utf-8")
        return target

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a file that :meth:`save` wrote.

        Args:
            path: the file.

        Raises:
            ValueError: for anything missing, unknown or impossible, with the file's name.
        """
        try:
            return cls._from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"trace {path}: not a valid trace: {error}") from error

    @classmethod
    def _from_json(cls, data: Any) -> Trace:
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise ValueError(f'must have "format": "{FORMAT}"')
        if (version := data.pop("version", None)) != FORMAT_VERSION:
            raise ValueError(f"version = {version!r}: this release reads {FORMAT_VERSION}; record the trace again")
        unknown = set(data) ^ {f.name for f in fields(cls)}
        if unknown:
            raise ValueError(f"missing or unknown keys: {', '.join(sorted(unknown))}")
        batches = tuple(TraceBatch(**batch) for batch in data.pop("batches"))
        return cls(source=Source(**data.pop("source")), batches=batches, **data)


def as_profile(
    trace: Trace, moment: TraceBatch, boundaries: Sequence[int], num_micro_batches: int, batch: int = 0,
    weight_share: float = 0.0,
) -> PipelineProfile:
    """A profile as the engine would measure it, without noise.

    Activations are those of :class:`~benchmarks.replay.layers.ReplayLayer`: as many bytes as the dense layer's
    parameters. Frozen layers hold none, nor gradients and optimizer state.

    Args:
        trace: names the layers.
        moment: their seconds and bytes.
        boundaries: S + 1 layer indices.
        num_micro_batches: M.
        batch: number of the batch.
        weight_share: of every backward, what computes gradients of weights and may be done later.
    """
    layers = []
    for i, (name, f, b, size, dense) in enumerate(zip(
        trace.layers, moment.forward_s, moment.backward_s, moment.parameter_bytes,
        trace.batches[0].parameter_bytes, strict=True,
    )):  # fmt: skip
        trains = i >= moment.frozen_layers
        # fp32 parameters, as many gradients, AdamW's two moments.
        held = (size, size * trains, 2 * size * trains, dense * trains)
        layers.append(LayerProfile(name, f, b, size // 4, *held, weight_share * b))
    return PipelineProfile(batch, tuple(boundaries), num_micro_batches, tuple(layers), ())
