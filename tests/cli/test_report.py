"""``dynpipe report``: where the page is written, and what is said of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.journal.told import Job


def test_the_command(tmp_path: Path, dynpipe: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Job(Path("runs/first")).write(range(20))
    done = dynpipe("report", "runs/first")
    assert done.code == 0 and done.out == "written: runs/first/report.html\n" and not done.err
    assert Path("runs/first/report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    values = dynpipe("report", "runs", "--output", "new/page.html", "--json").json
    assert values["page"] == "new/page.html" and values["limiting_stage"] == 1 and Path("new/page.html").is_file()
    refused = dynpipe("report", "nowhere")
    assert refused.code == 2 and "nowhere: no such folder; give the folder" in refused.err
