"""Where a checkpoint can't be: under a name that would poison the folder, or on a disk that is full."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch.distributed as dist

from dynpipe_ds import CheckpointError
from dynpipe_ds.checkpoint import folder
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint_faults import RUN, same_text


def contents(place: Path) -> dict[str, bytes]:
    dist.barrier()
    found = {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}
    dist.barrier()
    return found


def names(rank: int, place: Path) -> None:
    engine = make_engine(Run(2))
    for tag in (100, numpy.int64(101), "runs/step5"):
        engine.save_checkpoint(place, tag=tag)
        assert (place / "latest").read_text() == str(tag)
        assert engine.load_checkpoint(place)[0] is not None and engine.load_checkpoint(place, tag)[0] is not None
    engine.wait_for_disk()
    before = contents(place)
    for tag in ("latest", "", "..", "a/../b", ".step.partial", "a\0b", "/elsewhere/a", " a", "zero_to_fp32.py"):
        for use in (engine.save_checkpoint, engine.load_checkpoint):
            with pytest.raises(ValueError, match=r"^tag = ") as caught:
                use(place, tag=tag)
            same_text(str(caught.value))
    for where, tag, text in (
        (place, "runs", "runs holds something else than a checkpoint, which would be lost"),
        (place, "100/a", "100 is a checkpoint itself"),
        (place, "x" * 300, "the file system allows names of"),
        (place / "latest", "a", "latest is a file; name a folder"),
    ):
        with pytest.raises(CheckpointError, match=text) as caught:
            engine.save_checkpoint(where, tag=tag)
        same_text(str(caught.value))
    # A name that one rank alone objects to stops all of them.
    with pytest.raises(ValueError, match="tag = 'latest': ") as caught:
        engine.save_checkpoint(place, tag="latest" if rank == 1 else "fine")
    same_text(str(caught.value))
    with pytest.raises(CheckpointError, match="the ranks name different checkpoints"):
        engine.load_checkpoint(place, tag=["100", "101"][rank])
    assert contents(place) == before, "nothing was written or lost"
    engine.train_batch(data(0, 4))


def test_names_that_poison_the_folder_are_refused_everywhere(tmp_path: Path) -> None:
    run_ranks(names, 2, tmp_path)


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[None]:
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def fill_the_disk(rank: int, place: Path) -> None:
    """Checkpoints until one does not fit; then there is room again."""
    engine = make_engine(RUN)
    batches = data(0, RUN.micro_batches)
    engine.train_batch(batches)
    engine.save_checkpoint(place, tag="first")
    old, before = digest(engine), contents(place)
    dist.barrier()
    if rank == 0:
        room = os.statvfs(place)
        (place / "ballast").write_bytes(b"\1" * (room.f_bavail * room.f_frsize - 40_000))
    dist.barrier()
    engine.train_batch(batches)
    for tag in ("second", "first"):  # a new one, and one that would replace another
        with pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(place, tag=tag)
        text = same_text(str(caught.value))
        assert f": CheckpointError: {place}/.{tag}.partial/" in text and ": the disk is full: " in text, text
        assert " bytes are needed, " in text and " are free, at least " in text and " are missing; make room" in text
        assert {name: c for name, c in contents(place).items() if name != "ballast"} == before
    engine.load_checkpoint(place)
    assert digest(engine) == old
    dist.barrier()
    if rank == 0:
        (place / "ballast").unlink()
    dist.barrier()
    engine.save_checkpoint(place, tag="second")
    engine.load_checkpoint(place)


def test_a_full_disk_is_called_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m"):
        run_ranks(fill_the_disk, 3, tmp_path / "disk")


def limited_files(rank: int, place: Path) -> None:
    """No mount needed: the kernel refuses large files to one rank; and the disk tells only later."""
    engine = make_engine(RUN)
    engine.train_batch(data(0, RUN.micro_batches))
    engine.save_checkpoint(place, tag="first")
    engine.wait_for_disk()
    before = contents(place)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if rank == 1 else limits[0], limits[1]))
    words = r"the file is too large: [\d,]+ bytes are needed and this process may write files of 4,096 bytes; raise "
    with pytest.raises(CheckpointError, match=f"rank 1: CheckpointError: .*: {words}the limit") as caught:
        engine.save_checkpoint(place, tag="second")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    same_text(str(caught.value))
    assert contents(place) == before
    for number, words in ((28, "the disk is full: "), (122, "the disk quota is used up: ")):
        broken: Any = patch.object(folder, "sync", side_effect=OSError(number, os.strerror(number)))
        with broken if rank == 1 else nullcontext():
            engine.save_checkpoint(place, tag="second")
            with pytest.raises(CheckpointError, match=f"rank 1: .*{place}/second/.*: {words}.* make room") as caught:
                engine.wait_for_disk()
        same_text(str(caught.value))
    engine.load_checkpoint(place)


def test_a_limit_on_files_and_a_quota_are_named(tmp_path: Path) -> None:
    run_ranks(limited_files, 3, tmp_path)
