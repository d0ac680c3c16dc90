"""Paths lead to objects, and back."""

from __future__ import annotations

from typing import Any

import pytest

from dynpipe_ds.migration.names import Names


def test_only_what_a_path_leads_to_has_a_name() -> None:
    settings: dict[str, Any] = {"a": [1]}
    names = Names({"settings": settings})
    first = settings["a"]
    assert names.of(first) == ("settings", ("item", "a")) and names.resolve(("settings", ("item", "a"))) is first
    settings["a"] = [2]
    assert names.of(first) is None, "the script has put something else there"
    with pytest.raises(LookupError, match=r"settings\['b'\] does not exist there"):
        names.resolve(("settings", ("item", "b")))
