"""Text tables."""

from __future__ import annotations

from dynpipe_ds.reporting import format_table


def test_columns_are_aligned() -> None:
    """Names to the left, values to the right, short rows filled up."""
    assert format_table([["", "a", "bbbb"], ["name", "1"], ["n", "222", "3"]]) == (
        "        a  bbbb\n---------------\nname    1\nn     222     3"
    )
