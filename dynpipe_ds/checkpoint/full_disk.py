"""A full disk is called a full disk, with the file and the bytes that are missing.

torch's writer of zip archives knows no reasons, only that it could not go on, so the file system is asked then.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.serialization import save

from dynpipe_ds.checkpoint.manifest import CheckpointError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def naming_full_disk(path: Path, num_bytes: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn the errors of a disk that is full into one that says so.

    Args:
        path: file or folder that is written inside.
        num_bytes: size that the file shall have; asked only when writing failed.

    Raises:
        CheckpointError: naming the file, bytes needed, free and missing, and the remedy; any other error as it is.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:
        text = full_disk_text(error, path, num_bytes)
        if text:
            raise CheckpointError(text) from error
        raise


def full_disk_text(error: Exception, path: Path, num_bytes: Callable[[], int] = lambda: 0) -> str:
    """Say of an error that it means a full disk, if it does.

    Args:
        error: what writing raised.
        path: file or folder that was to be written.
        num_bytes: size that the file should have.

    Returns:
        File, bytes needed, free and missing, and the remedy; empty if the reason is another.
    """
    known = error.errno if isinstance(error, OSError) else None
    if known is not None and known not in _FULL:
        return ""
    needed = num_bytes()
    reason = known or _refusal(path, needed)
    if reason not in _FULL:
        return ""
    if reason == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        most = f"this process may write files of {limit:,} bytes" if limit >= 0 else "the file system allows less"
        return f"{path}: the file is too large: {needed:,} bytes are needed and {most}; raise the limit (ulimit -f)"
    existing = next(place for place in [path, *path.parents] if place.exists())
    system = os.statvfs(existing)
    written = path.stat().st_size if path.is_file() else 0
    free = system.f_bavail * system.f_frsize + written
    if system.f_files and not system.f_favail:
        amount = "no file can be added, its inodes are used up"
    elif needed:
        amount = f"{needed:,} bytes are needed, {free:,} are free, at least {max(1, needed - free):,} are missing"
    else:
        amount = f"{free:,} bytes are free"
    what = "the disk quota is used up" if reason == errno.EDQUOT else "the disk is full"
    return f"{path}: {what}: {amount}; make room, or save to another disk ({os.strerror(reason)})"


def _refusal(path: Path, num_bytes: int) -> int:
    """The error with which the file system refuses so many bytes; 0 if it does not."""
    if not path.is_file() or num_bytes <= 0:
        return 0
    try:
        with open(path, "ab") as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        return error.errno or 0
    return 0


class _Counter:
    """A file that keeps nothing."""

    num_bytes = 0

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self.num_bytes += count
        return count

    def flush(self) -> None:
        pass


def stored_bytes(value: Any) -> int:
    """Bytes that a file with this content has; serializes it, to nowhere."""
    file = _Counter()
    save(value, file)  # type: ignore[arg-type]  # asks for no more than these two
    return file.num_bytes
