"""The form of a journal: names, versions, numbers as they are written; from a profile to a line and back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dynpipe_ds.measure.profile import SECONDS, LayerProfile, PipelineProfile, StageProfile

FILE = "journal.jsonl"
FORMAT = "dynpipe_ds.journal"
FORMAT_VERSION = 1  # raised when a key changes its meaning

SIZES = ("num_parameters", "parameter_bytes", "gradient_bytes", "optimizer_state_bytes", "activation_bytes")
_MEASURED = ("forward_s", "backward_s")
_OF_STAGES = ("busy_s", "fill_drain_s", "waiting_s", "step_s", "batch_s", "peak_memory_bytes")
_DIGITS = 5  # significant, of seconds: clocks tell no more


def line(kind: str, values: Mapping[str, Any]) -> bytes:
    """One line of the file, with its end.

    Args:
        kind: of the line.
        values: what it tells.
    """
    return (json.dumps({"kind": kind, **values}, separators=(",", ":")) + "\n").encode()


def number(value: float) -> float | str:
    """A number as JSON can hold it: one that is not finite is text.

    Args:
        value: any.
    """
    return value if math.isfinite(value) else str(value)


def seconds(values: Iterable[float | None]) -> list[float | None]:
    """Seconds in as many digits as they are known.

    Args:
        values: seconds; ``None`` where they are not known.
    """
    return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in values]


def told_profile(measured: PipelineProfile, smoothed: PipelineProfile) -> dict[str, Any]:
    """What a line tells of a profile; sizes of layers are told apart, since they rarely change.

    Args:
        measured: of one batch.
        smoothed: that decisions rest on, with halves of backwards where they are known.
    """
    return {
        "batch": measured.batch, "boundaries": measured.boundaries, "num_micro_batches": measured.num_micro_batches,
        "layers": _columns(measured.layers, _MEASURED), "smoothed": _columns(smoothed.layers, SECONDS),
        "stages": _columns(measured.stages, _OF_STAGES), "link_s": seconds(measured.link_s),
    }  # fmt: skip


def told_sizes(profile: PipelineProfile) -> dict[str, list[int]]:
    """Bytes and parameters of every layer, by column.

    Args:
        profile: of one batch.
    """
    return {name: [getattr(layer, name) for layer in profile.layers] for name in SIZES}


def profile_of(
    told: Mapping[str, Any], columns: Mapping[str, Sequence[float]], sizes: Mapping[str, Sequence[int]],
    names: Sequence[str],
) -> PipelineProfile:
    """Put a profile together again.

    Args:
        told: what :func:`told_profile` gave.
        columns: its ``layers`` or its ``smoothed``.
        sizes: what :func:`told_sizes` gave last.
        names: of all layers.
    """
    layers = tuple(
        LayerProfile(name, **{key: column[i] for key, column in (*columns.items(), *sizes.items())})  # type: ignore[arg-type]
        for i, name in enumerate(names)
    )
    return PipelineProfile(
        told["batch"], told["boundaries"], told["num_micro_batches"], layers, stages_of(told), tuple(told["link_s"])
    )


def stages_of(told: Mapping[str, Any]) -> tuple[StageProfile, ...]:
    """The stages that a line tells of.

    Args:
        told: what :func:`told_profile` gave.
    """
    columns = told["stages"]
    rows = zip(*columns.values(), strict=True)
    return tuple(StageProfile(**dict(zip(columns, row, strict=True))) for row in rows)


def _columns(rows: Sequence[LayerProfile | StageProfile], names: Sequence[str]) -> dict[str, list[Any]]:
    return {
        name: seconds(values) if name.endswith("_s") else values
        for name, values in ((name, [getattr(row, name) for row in rows]) for name in names)
    }
