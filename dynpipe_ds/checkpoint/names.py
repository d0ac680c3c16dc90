"""Which names a checkpoint may have: none that another file, another checkpoint or ``latest`` would suffer from."""

from __future__ import annotations

import os
from pathlib import Path

from dynpipe_ds.checkpoint.manifest import MANIFEST_FILE, CheckpointError
from dynpipe_ds.ranks.agreement import gather

# Files that DeepSpeed and this package put next to the checkpoints.
_TAKEN = ("latest", "latest_universal", "zero_to_fp32.py", "zero_to_torch.py")
_LONGEST_MARK = len(".") + len(".replaced")  # around the last part of a tag while its folder is no checkpoint
_LONGEST_FILE = 100  # bytes of the longest path inside a checkpoint; DeepSpeed's have 60


def tag_problem(tag: str) -> str:
    """Say what is wrong with a tag, wherever its folder would be.

    Args:
        tag: name of a checkpoint; parts between slashes are folders.

    Returns:
        Value, rule and remedy; empty if nothing is wrong.
    """
    parts = tag.split("/")
    if not tag.strip():
        rule = "must name a checkpoint; give a name such as 'step100', or none for the usual one"
    elif parts[0] in _TAKEN:
        rule = (
            f"DeepSpeed keeps a file of that name next to the checkpoints; {_another(tag)}, and load the newest one "
            "without a tag"
        )
    elif not tag.isprintable() or tag != tag.strip():
        rule = (
            "must consist of printable characters without space at the ends, since the file 'latest' holds it as text; "
            f"{_another(tag)}"
        )
    elif tag.startswith("/"):
        rule = "must not be an absolute path; give the folder of all checkpoints as save_dir or load_dir"
    elif any(part in ("", ".", "..") for part in parts):
        rule = f"must not contain empty parts, '.' or '..'; {_another(tag)}"
    elif any(part.startswith(".") for part in parts):
        rule = f"must not begin with '.', as the folders of unfinished checkpoints do; {_another(tag)}"
    else:
        return ""
    return f"tag = {tag!r}: {rule}"


def _another(tag: str) -> str:
    plain = "".join(c for c in tag if c.isalnum() or c in "_-").removesuffix("py")
    return f"use another name, for example {f'step_{plain}'!r}"


def place_problem(save_dir: Path, tag: str) -> str:
    """Say why a checkpoint can't be written in its place: something else is there that would be lost.

    Args:
        save_dir: folder of all checkpoints.
        tag: name of this one, without a :func:`tag_problem`.

    Returns:
        Value, rule and remedy; empty if it can be written.
    """
    try:
        return _place_problem(save_dir, tag)
    except (OSError, ValueError) as error:
        return f"save_dir = {str(save_dir)!r}: can't be used: {error}"


def _place_problem(root: Path, tag: str) -> str:
    if "\0" in str(root):
        return f"save_dir = {str(root)!r}: a path can't contain '\\0'; name a folder"
    target = root / tag
    found = next((folder for folder in [root, *root.parents] if folder.exists()), Path())
    if not found.is_dir():
        return f"save_dir = {str(root)!r}: {found} is a file; name a folder, or one that can be made"
    longest = max(len(os.fsencode(part)) for part in target.parts) + _LONGEST_MARK
    if longest > os.pathconf(found, "PC_NAME_MAX"):
        room = os.pathconf(found, "PC_NAME_MAX") - _LONGEST_MARK
        return f"tag = {tag!r}: the file system allows names of {room} bytes here; use a shorter one"
    if len(os.fsencode(target.absolute())) + _LONGEST_FILE > os.pathconf(found, "PC_PATH_MAX"):
        room = os.pathconf(found, "PC_PATH_MAX") - _LONGEST_FILE
        return f"tag = {tag!r}: {target} would be a path of more than {room} bytes; use a shorter one"
    for folder in [target, *target.parents[: tag.count("/")]]:
        if folder.exists() and not folder.is_dir():
            return f"tag = {tag!r}: {folder} is a file; use another name, or move it away"
        if folder != target and (folder / MANIFEST_FILE).exists():
            return f"tag = {tag!r}: {folder} is a checkpoint itself, whose end this one would share; use another name"
    if target.is_dir() and any(target.iterdir()) and not _is_checkpoint(target):
        return (
            f"tag = {tag!r}: {target} holds something else than a checkpoint, which would be lost; use another name, "
            "or move it away"
        )
    return ""


def _is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST_FILE).exists() or any(folder.glob("mp_rank_*_model_states.pt"))


def agree_on_place(target: Path, problem: str) -> None:
    """Go on with a checkpoint that all ranks name alike, and whose name no rank objects to; collective.

    Args:
        target: this rank's folder of the checkpoint.
        problem: what this rank has against it; empty if nothing.

    Raises:
        ValueError: on every rank, with the first rank's problem.
        CheckpointError: on every rank, if the ranks name different folders.
    """
    everyone = gather((str(target), problem))
    problems = [text for _, text in everyone if text]
    if problems:
        raise ValueError(problems[0])
    places = {place for place, _ in everyone}
    if len(places) > 1:
        raise CheckpointError(f"the ranks name different checkpoints: {sorted(places)}; give all the same")
