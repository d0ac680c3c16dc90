"""A folder that is complete or not there, whatever process is killed while it is written.

Everything is written into ``.<tag>.partial``; one rename then makes it ``<tag>``. Only after that does
``latest``, itself replaced by a rename, name it. What a process wrote survives its end, so that nothing
waits for the disk; threads push the files there afterwards, in case the machine itself fails.

``target`` is a checkpoint's final folder, ``save_dir`` the folder of all checkpoints.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dynpipe_ds.checkpoint.full_disk import full_disk_text, naming_full_disk
from dynpipe_ds.checkpoint.manifest import MANIFEST_FILE, CheckpointError, FileEntry
from dynpipe_ds.telling import log

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_READ_BYTES = 1 << 20
_SYNC_THREADS = 4  # file systems commit syncs that come together at once


def partial_folder(target: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return target.with_name(f".{target.name}.partial")


def _replaced_folder(target: Path) -> Path:
    return target.with_name(f".{target.name}.replaced")


def start(target: Path) -> None:
    """Make an empty folder to write into; clears away what killed processes left behind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    for replaced in target.parent.glob(".*.replaced"):
        find(replaced.with_name(replaced.name[1:].removesuffix(".replaced")))
    for leftover in [*target.parent.glob(".*.replaced"), *target.parent.glob(".*.partial")]:
        if leftover.is_dir():
            shutil.rmtree(leftover)
    partial_folder(target).mkdir()


def publish(target: Path) -> None:
    """Give the written folder its name; an older one of that name goes only now."""
    partial = partial_folder(target)
    if not target.exists():
        os.rename(partial, target)
        return
    if _exchange(partial, target):
        shutil.rmtree(partial)
        return
    replaced = _replaced_folder(target)
    os.rename(target, replaced)
    os.rename(partial, target)
    shutil.rmtree(replaced)


def discard(target: Path) -> None:
    """Remove what was written for a checkpoint that failed, and put back what it was to replace."""
    shutil.rmtree(partial_folder(target), ignore_errors=True)
    with contextlib.suppress(OSError):
        find(target)


def find(target: Path) -> bool:
    """Tell whether a checkpoint is there.

    A process may have been killed between the two renames that replace a checkpoint on file systems that
    can't exchange two folders; the old one is then put back.
    """
    replaced = _replaced_folder(target)
    if not target.exists() and (replaced / MANIFEST_FILE).exists():
        os.rename(replaced, target)
    return target.is_dir()


def write_latest(save_dir: Path, tag: str) -> None:
    """Make ``latest`` name a checkpoint, at once."""
    partial = save_dir / ".latest.partial"
    write_text(partial, tag)
    os.replace(partial, save_dir / "latest")


def write_text(path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        CheckpointError: if there is no room for it.
    """
    with naming_full_disk(path, lambda: len(text.encode())):
        path.write_text(text, encoding="utf-8")


def read_latest(save_dir: str | Path) -> str | None:
    """What ``latest`` names; ``None`` if there is no such file."""
    file = Path(save_dir) / "latest"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def named_checkpoints(save_dir: Path) -> list[str]:
    """Names of the checkpoints that were completed in a folder, sorted."""
    return sorted(f.name for f in save_dir.glob("*") if f.is_dir() and f.name[0] != ".")


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step (Linux; not on every file system); false if it can't be done."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    swapped: int = renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE)
    return swapped == 0


# -- checksums --------------------------------------------------------------------------------


def fingerprint(path: Path) -> FileEntry:
    """Size and checksum of a file that was just written; reads little of a zip archive."""
    num_bytes = path.stat().st_size
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return FileEntry(num_bytes, _index_digest(archive), of_index=True)
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return FileEntry(num_bytes, digest.hexdigest(), of_index=False)


def _index_digest(archive: zipfile.ZipFile) -> str:
    index = [(i.filename, i.CRC, i.file_size, i.header_offset) for i in archive.infolist()]
    return hashlib.sha256(repr(index).encode()).hexdigest()


def verify(path: Path, entry: FileEntry) -> None:
    """Read a whole file and compare it with its checksum.

    Raises:
        CheckpointError: if it is missing, has another size or another content.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    num_bytes = path.stat().st_size
    if num_bytes != entry.num_bytes:
        raise CheckpointError(f"{path} has {num_bytes} bytes and was saved with {entry.num_bytes}")
    try:
        intact = fingerprint(path) == entry and (not entry.of_index or _records_intact(path))
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path} is damaged or can't be read: {error}") from error
    if not intact:
        raise CheckpointError(f"{path} is damaged: its checksum is not the one it was saved with")


def _records_intact(path: Path) -> bool:
    with zipfile.ZipFile(path) as archive:
        return archive.testzip() is None


# -- pushing to the disk ----------------------------------------------------------------------


class DiskSync:
    """Files and folders that threads push to the disk while training goes on; the interpreter waits for them.

    Args:
        name: of the checkpoint, for messages.
        paths: files, and folders for their lists of names.
    """

    def __init__(self, name: str, paths: Iterable[Path]) -> None:
        self._name = name
        threads = ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="dynpipe_ds sync")
        self._pending = [threads.submit(self._push, path) for path in paths]
        threads.shutdown(wait=False)

    def _push(self, path: Path) -> str:
        try:
            sync(path)
        except FileNotFoundError:  # the user has removed the checkpoint
            return ""
        except OSError as error:
            log.error(f"checkpoint {self._name} is not safe on the disk: {path}: {error}")
            return full_disk_text(error, path) or f"{path}: {error}"
        return ""

    def wait(self) -> None:
        """Wait until everything is on the disk.

        Raises:
            CheckpointError: naming the files that could not be pushed there.
        """
        problems = [problem for future in self._pending if (problem := future.result())]
        if problems:
            raise CheckpointError(
                f"{'; '.join(problems)}; checkpoint {self._name} may be lost if this machine fails: save again"
            )


def sync(path: Path) -> None:
    """Push a file's content, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
