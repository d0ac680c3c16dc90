"""A text table."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of cells: the first column to the left, the others to the right.

    Args:
        rows: the first one is the head. A rule is drawn under it; shorter rows are filled up.

    Returns:
        Lines joined by newlines, without trailing blanks.
    """
    width = max(len(row) for row in rows)
    full = [[*row, *[""] * (width - len(row))] for row in rows]
    widths = [max(len(row[column]) for row in full) for column in range(width)]
    lines = [
        "  ".join(
            cell.ljust(size) if column == 0 else cell.rjust(size)
            for column, (cell, size) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in full
    ]
    rule = "-" * (sum(widths) + 2 * (width - 1))
    return "\n".join([lines[0], rule, *lines[1:]])
