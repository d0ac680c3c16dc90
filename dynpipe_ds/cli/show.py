"""How values are shown to people."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from dynpipe_ds.reporting import format_table

UNKNOWN = "n/a"
NO_HALVES = (
    "planned orders are left out: no backward was split while this profile was measured; assume what can be done later "
    "by --weight-share, such as 0.5"
)


def table(columns: Mapping[str, str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Show values in the units of their keys: ``_s`` as milliseconds, ``_bytes`` as MiB, ``_ratio`` as a share.

    Columns are keys by what the head says; what a row does not have is unknown.
    """
    return format_table([list(columns), *([_cell(key, row.get(key)) for key in columns.values()] for row in rows)])


def _cell(key: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return UNKNOWN if value is None else value
    if key.endswith("_s"):
        return milliseconds(value)
    if key.endswith("_bytes"):
        return mebibytes(value)
    return f"{value:.1%}" if key.endswith("_ratio") else f"{value:,}"


def milliseconds(value_s: float) -> str:
    """Show seconds as milliseconds."""
    return _readable(value_s * 1e3)


def mebibytes(num_bytes: float) -> str:
    """Show bytes as MiB."""
    return _readable(num_bytes / 2**20)


def _readable(value: float) -> str:
    digits = 0 if value >= 10_000 else 1 if value >= 100 else 2 if value >= 1 or value == 0 else 4
    return f"{value:,.{digits}f}"


def brackets(boundaries: Sequence[int]) -> str:
    """Show boundaries as everywhere: ``[0 5 9 14]``."""
    return "[" + " ".join(map(str, boundaries)) + "]"


def layer_spans(layers: Collection[int]) -> str:
    """Show layers, at least one, by their indices: ``layer 3``, ``layers 0-2, 7``."""
    first = sorted(layer for layer in layers if layer - 1 not in layers)
    last = sorted(layer for layer in layers if layer + 1 not in layers)
    spans = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in zip(first, last, strict=True))
    return f"layer{'s' if len(layers) > 1 else ''} {spans}"


def assumed(weight_share: float) -> str:
    """What is said below planned orders where the profile does not know halves of backwards.

    Args:
        weight_share: assumed, of a backward.
    """
    part = f"of a backward {weight_share:.0%} are gradients of weights"
    return f"assumed: {part}, which may be done later (--weight-share)"
