"""The tables and pictures of docs/schedules.md are what the planner and the simulator say."""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from dynpipe_ds.planning import plan_order
from tests.docs.pages import DOCS

spec: Any = importlib.util.spec_from_file_location("schedules", DOCS / "schedules.py")
schedules: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(schedules)
REMEDY = "docs/schedules.md is out of date: python docs/schedules.py"


def test_the_tables_are_up_to_date() -> None:
    assert schedules.page() == schedules.PAGE.read_text(encoding="utf-8"), REMEDY


def test_the_pictures_are_of_what_the_page_says() -> None:
    """They are there and shown; the seconds in the text are theirs; a planned order keeps the memory of 1F1B."""
    text = schedules.PAGE.read_text(encoding="utf-8")
    found = schedules.pictures()
    assert set(re.findall(r"\(images/(.*?)\)", text)) == set(found)
    for name, simulations in found.items():
        assert (DOCS / "images" / name).read_bytes().startswith(b"\x89PNG")
        usual, planned = simulations["1F1B"], simulations["planned"]
        assert planned.makespan_s < usual.makespan_s
        most = max(stage.peak_activation_bytes for stage in usual.stages)
        assert max(stage.peak_activation_bytes for stage in planned.stages) <= most
    equal = found["schedules_equal.png"]
    seconds = [f"{equal[name].makespan_s * 1e3:.0f} ms" for name in ("planned", "1F1B")]
    assert f"takes {seconds[0]}, not {seconds[1]}" in text
    workload = schedules.equal_stages()
    assert plan_order(workload).least_s * (1 + 1e-9) >= equal["planned"].makespan_s, "ZB-H1 is as short as can be"
