"""What is written of a run is what is read, also while it is being written, torn, or written again."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from dynpipe_ds.journal import Journal, find_journals, read_journal
from dynpipe_ds.journal.standing import standing
from dynpipe_ds.journal.write import JournalWriter
from tests.journal.told import NAMES, Job


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text(encoding="utf-8").splitlines()]


def test_what_was_written_is_read(tmp_path: Path) -> None:
    job = Job(tmp_path / "new" / "folder", settings={"min_gain": 0.01})
    job.write(range(20), profile_every=2)
    journal = read_journal(tmp_path)
    assert journal.about["layers"] == list(NAMES) and journal.about["settings"] == {"min_gain": 0.01}
    assert [each.batch for each in journal.batches] == list(range(20))
    assert [each.loss for each in journal.batches] == [2.0 - 0.01 * batch for batch in range(20)], "equal bits"
    assert [each.batch for each in journal.profiles] == list(range(0, 20, 2))
    assert journal.moves == [job.event()] and journal.repacks == [] and journal.resumed_at == []
    assert journal.partitions == [(0, job.boundaries), (16, job.better)]
    newest, expected = journal.profiles[-1], job.profile(18)
    assert newest.order == "planned" and newest.boundaries == job.better
    assert list(newest.layer_s) == pytest.approx([layer.seconds for layer in expected.layers])
    assert newest.bubble_ratio == pytest.approx(expected.bubble_ratio, rel=1e-4)
    assert [stage.peak_memory_bytes for stage in newest.stages] == [2**20, 2**21]
    assert [profile.limiting_stage for profile in journal.profiles] == [0] * 6 + [1] * 4
    assert journal.last_profile == job.profile(18, halves=True)
    assert journal.silent_s < 60 and not journal.num_unreadable


def test_what_layers_take_to_compile(tmp_path: Path) -> None:
    """Of the first batch after a move is what arrived; a process that goes on forgets later ones."""
    Job(tmp_path, compiles={0: 4.0, 16: 1.25, 18: 2.0}).write(range(20))
    journal = read_journal(tmp_path)
    assert [(each.batch, each.seconds) for each in journal.compiled] == [(0, 4.0), (16, 1.25), (18, 2.0)]
    assert [journal.compiled_after(move) for move in journal.moves] == [1.25]
    assert standing(journal)["compiling_s"] == 7.25 and standing(journal)["moves"][0]["compiling_s"] == 1.25
    Job(tmp_path, moved_at=19).write(range(17, 19))
    assert [each.batch for each in read_journal(tmp_path).compiled] == [0, 16]


def test_only_the_first_rank_writes_and_none_without_a_folder(tmp_path: Path) -> None:
    Job(tmp_path / "second").write(range(3), rank=1)
    with patch("torch.distributed.get_rank", return_value=0):
        JournalWriter(None, dict).batch(0, 1.0, 1.0)
    assert not list(tmp_path.iterdir())


def test_sizes_are_written_where_they_change(tmp_path: Path) -> None:
    Job(tmp_path).write(range(6))
    assert [("sizes" in line, "pinned" in line) for line in lines(tmp_path) if line["kind"] == "profile"] == [
        (True, True), *[(False, False)] * 5,
    ]  # fmt: skip


def test_it_is_read_while_it_is_written(tmp_path: Path) -> None:
    """In pieces of any length: a line counts when it is whole."""
    Job(tmp_path / "whole").write(range(18))
    text = (tmp_path / "whole" / "journal.jsonl").read_bytes()
    file = tmp_path / "journal.jsonl"
    file.write_bytes(b"")
    journal = Journal(file)
    assert not journal.update() and journal.is_empty and journal.last_profile is None
    seen = []
    for start in range(0, len(text), 1000):
        with file.open("ab") as opened:
            opened.write(text[start : start + 1000])
        journal.update()
        seen.append(len(journal.batches))
    assert seen == sorted(seen) and len(set(seen)) > 5 and seen[-1] == 18 and not journal.num_unreadable
    assert not journal.update(), "nothing was added"
    assert journal.batches == read_journal(tmp_path / "whole").batches
    assert journal.last_profile == read_journal(tmp_path / "whole").last_profile


def test_a_torn_line_is_left_out_and_a_later_process_begins_a_new_one(tmp_path: Path) -> None:
    """Killed within a line; continued from a checkpoint of batch 4."""
    Job(tmp_path).write(range(8))
    file = tmp_path / "journal.jsonl"
    with file.open("ab") as opened:
        opened.write(b'{"kind":"batch","batch":8,"lo')
    assert len(read_journal(tmp_path).batches) == 8, "it may still be being written"
    Job(tmp_path, moved_at=6).write(range(4, 7))
    journal = read_journal(tmp_path)
    assert [each.batch for each in journal.batches] == [0, 1, 2, 3, 4, 5, 6]
    assert [each.batch for each in journal.profiles] == [0, 1, 2, 3, 4, 5, 6]
    assert [move.batch for move in journal.moves] == [6] and journal.resumed_at == [4]
    assert journal.num_unreadable == 1


def test_a_run_that_is_begun_again_is_told_alone(tmp_path: Path) -> None:
    Job(tmp_path).write(range(20))
    Job(tmp_path, frozen_at=0).write(range(2))
    journal = read_journal(tmp_path)
    assert len(journal.batches) == 2 and not journal.moves and not journal.resumed_at
    assert journal.last_profile == Job(tmp_path, frozen_at=0).profile(1, halves=True)


def test_a_reader_notices_another_file_by_the_same_name(tmp_path: Path) -> None:
    Job(tmp_path).write(range(20))
    journal = read_journal(tmp_path)
    (tmp_path / "journal.jsonl").unlink()
    Job(tmp_path).write(range(3))
    assert journal.update() and len(journal.batches) == 3


def test_lines_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    Job(tmp_path).write(range(2))
    with (tmp_path / "journal.jsonl").open("a") as opened:
        opened.write('{"kind":"weather","sun":1}\n[]\nnot JSON\n')
    journal = read_journal(tmp_path)
    assert len(journal.batches) == 2 and journal.num_unreadable == 3


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (torch.tensor([1.5]), 1.5), (2, 2.0), (float("nan"), "nan"), (torch.tensor(-math.inf), "-inf"),
        (torch.zeros(2), None), ({"loss": 1.0}, None), (None, None), ("low", None),
    ],
    ids=str,
)  # fmt: skip
def test_losses_of_any_kind(tmp_path: Path, loss: object, told: object) -> None:
    """Strict JSON; what ``train_batch`` of a client's own returns need be no loss."""
    writer = JournalWriter(str(tmp_path), Job(tmp_path).about)
    with patch("torch.distributed.get_rank", return_value=0):
        writer.batch(0, loss, 0.5)
    assert lines(tmp_path)[-1]["loss"] == told
    read = read_journal(tmp_path).batches[0].loss
    assert read == told or (read is not None and (math.isnan(read) or math.isinf(read)))


class OnDevice(torch.Tensor):
    """As a tensor of a GPU: whoever reads it waits."""

    reads = 0

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")

    def item(self) -> float:  # type: ignore[override]
        OnDevice.reads += 1
        return 1.25


def test_losses_on_a_device_wait(tmp_path: Path) -> None:
    """For the next profile, or ten batches, or the end: reading each would let the device run dry."""
    writer = JournalWriter(str(tmp_path), (job := Job(tmp_path)).about)
    loss = torch.zeros(1).as_subclass(OnDevice)
    with patch("torch.distributed.get_rank", return_value=0):
        for batch in range(9):
            writer.batch(batch, loss, 0.5)
        assert OnDevice.reads == 0 and not (tmp_path / "journal.jsonl").exists()
        writer.batch(9, loss, 0.5)
        assert len(read_journal(tmp_path).batches) == 10 == OnDevice.reads
        writer.batch(10, loss, 0.5)
        writer.profile(job.profile(11), job.profile(11), order="1F1B", speeds=None, pinned=())
        assert [each.loss for each in read_journal(tmp_path).batches] == [1.25] * 11
        writer.batch(11, loss, 0.5)
    del writer  # as a script that ends without destroying its engine
    assert len(read_journal(tmp_path).batches) == 12


def test_a_full_disk_stops_the_journal_alone(tmp_path: Path) -> None:
    writer = JournalWriter(str(tmp_path), Job(tmp_path).about)
    with patch("torch.distributed.get_rank", return_value=0):
        writer.batch(0, 1.0, 0.5)
        with (
            patch("os.write", side_effect=OSError(errno.ENOSPC, "No space left on device")),
            pytest.warns(UserWarning, match="journal .*could not be written .*No space left.*; training goes on"),
        ):
            writer.batch(1, 1.0, 0.5)
        writer.batch(2, 1.0, 0.5)  # neither a second warning nor a line
    assert len(read_journal(tmp_path).batches) == 1


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    writer = JournalWriter(str(tmp_path / "taken"), Job(tmp_path).about)
    with (
        patch("torch.distributed.get_rank", return_value=0),
        pytest.warns(UserWarning, match=r"journal .*taken/journal.jsonl could not be written"),
    ):
        writer.batch(0, 1.0, 0.5)


def test_journals_are_found(tmp_path: Path) -> None:
    """In a folder, and in those of several runs; the newest first."""
    for name in ("journal/static", "journal/dynamic"):
        Job(tmp_path / name).write(range(2))
    static, dynamic = (tmp_path / "journal" / name / "journal.jsonl" for name in ("static", "dynamic"))
    os.utime(static, (time.time() + 5,) * 2)
    assert find_journals(tmp_path) == [static, dynamic] and find_journals(dynamic) == [dynamic]
    assert read_journal(tmp_path).file == static


@pytest.mark.parametrize(
    ("name", "told"),
    [("nowhere", "no such folder"), ("empty", "no journal.jsonl in it"), ("bare", "tells of no batch")],
)
def test_a_folder_without_a_journal(tmp_path: Path, name: str, told: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "journal.jsonl").write_text("")
    with pytest.raises(ValueError, match=f'{told}.*; give the folder that "journal" names'):
        read_journal(tmp_path / name)
