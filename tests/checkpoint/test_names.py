"""Names that a checkpoint must not have: refused with value, rule and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynpipe_ds.checkpoint.manifest import MANIFEST_FILE
from dynpipe_ds.checkpoint.names import place_problem, tag_problem

GOOD = ["global_step100", "100", "runs/step5", "best model", "épreuve", "a.b", "step-1_x=2", "-1"]
BAD = {
    "": "must name a checkpoint",
    "  ": "must name a checkpoint",
    "latest": "DeepSpeed keeps a file of that name",
    "latest/x": "DeepSpeed keeps a file of that name",
    "latest_universal": "DeepSpeed keeps a file of that name",
    "zero_to_fp32.py": "DeepSpeed keeps a file of that name",
    "zero_to_torch.py": "DeepSpeed keeps a file of that name",
    ".": "must not contain empty parts, '.' or '..'",
    "..": "must not contain empty parts, '.' or '..'",
    "a/../../b": "must not contain empty parts, '.' or '..'",
    "a//b": "must not contain empty parts, '.' or '..'",
    "a/": "must not contain empty parts, '.' or '..'",
    "/elsewhere/a": "must not be an absolute path",
    ".a.partial": "must not begin with '.'",
    "runs/.a": "must not begin with '.'",
    "a\nb": "must consist of printable characters",
    "a\0b": "must consist of printable characters",
    " a": "must consist of printable characters without space at the ends",
    "a ": "must consist of printable characters without space at the ends",
    "a\udcff": "must consist of printable characters",
}


@pytest.mark.parametrize("tag", GOOD)
def test_good_names(tag: str, tmp_path: Path) -> None:
    assert tag_problem(tag) == "" and place_problem(tmp_path / "new" / "folder", tag) == ""


@pytest.mark.parametrize("tag", BAD)
def test_bad_names(tag: str) -> None:
    text = tag_problem(tag)
    assert text.startswith(f"tag = {tag!r}: {BAD[tag]}")
    assert any(remedy in text for remedy in ("use another name", "give ")), text


def test_places_where_something_else_would_be_lost(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    assert place_problem(tmp_path, "mine") == "", "an empty folder is nobody's"
    (tmp_path / "mine" / "notes").write_text("mine")
    (tmp_path / "old" / "mp_rank_00_model_states.pt").parent.mkdir()
    (tmp_path / "old" / "mp_rank_00_model_states.pt").write_text("")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / MANIFEST_FILE).write_text("")
    assert place_problem(tmp_path, "old") == place_problem(tmp_path, "ours") == "", "a checkpoint may be replaced"
    for folder, tag, text in (
        (tmp_path, "file", f"tag = 'file': {tmp_path}/file is a file"),
        (tmp_path, "file/a", f"tag = 'file/a': {tmp_path}/file is a file"),
        (tmp_path, "mine", f"tag = 'mine': {tmp_path}/mine holds something else than a checkpoint"),
        (tmp_path, "ours/a", f"tag = 'ours/a': {tmp_path}/ours is a checkpoint itself"),
        (tmp_path, "a" * 246, "the file system allows names of 245 bytes here; use a shorter one"),
        (tmp_path, "é" * 123, "the file system allows names of 245 bytes here; use a shorter one"),
        (tmp_path, "/".join(["a" * 200] * 20), "would be a path of more than"),
        (tmp_path / "file", "a", f"save_dir = '{tmp_path}/file': {tmp_path}/file is a file; name a folder"),
        (tmp_path / "file" / "b", "a", f"save_dir = '{tmp_path}/file/b': {tmp_path}/file is a file; name a folder"),
        (Path("a\0b"), "a", "a path can't contain"),
    ):
        assert text in place_problem(folder, tag), (folder, tag)
    assert place_problem(tmp_path, "a" * 245) == ""
