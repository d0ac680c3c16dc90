"""Pushing files to the disk while training goes on."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from dynpipe_ds import CheckpointError
from dynpipe_ds.checkpoint import folder

SCRIPT = """
import sys, time
from pathlib import Path
from dynpipe_ds.checkpoint import folder
place = Path(sys.argv[1])
def slow(path):
    time.sleep(0.5)
    (place / "pushed").write_text(str(path))
folder.sync = slow
folder.DiskSync("a", [place])
"""


def test_files_are_pushed_while_the_caller_goes_on(tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(9)]
    gate, pushed = threading.Event(), []

    def sync(path: Path) -> None:
        gate.wait(10)
        pushed.append(path)

    with patch.object(folder, "sync", sync):
        disk = folder.DiskSync("a", paths)
        assert not pushed
        gate.set()
        disk.wait()
    assert sorted(pushed) == paths


def test_a_removed_checkpoint_is_no_problem_and_a_full_disk_is(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("content")
    folder.DiskSync("a", [tmp_path / "there", tmp_path / "gone", tmp_path]).wait()
    with (
        patch.object(folder, "sync", side_effect=OSError(28, "No space left on device")),
        pytest.raises(CheckpointError, match=f"{tmp_path}: .*No space left.*checkpoint a may be lost"),
    ):
        folder.DiskSync("a", [tmp_path]).wait()


@pytest.mark.exhaustive
def test_the_interpreter_waits_for_the_disk(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True, timeout=120)
    assert (tmp_path / "pushed").read_text() == str(tmp_path)
