"""What is decided, refused, written and told when a run is saved and loaded; without an engine, on real files."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch

from dynpipe_ds import CheckpointError, MigrationError
from dynpipe_ds.checkpoint import folder, keep_in_checkpoints
from dynpipe_ds.checkpoint.checkpoints import Checkpoints
from dynpipe_ds.checkpoint.load import Wanted
from dynpipe_ds.checkpoint.manifest import MANIFEST_FILE, Manifest
from tests.checkpoint.fakes import Stage, files_of, make_run
from tests.one_rank import FakeRun, world

ALL = Wanted()


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with world():
        yield


def save(
    run: FakeRun, place: Path, tag: str | None = None, checkpoints: Checkpoints | None = None, **options: Any
) -> Checkpoints:
    """Save; the checkpoint is on the disk then."""
    checkpoints = checkpoints or Checkpoints()
    client_state = options.pop("client_state", {"epoch": 4})
    given = {"save_latest": True, "exclude_frozen_parameters": False, **options}
    checkpoints.save(run, str(place), tag, client_state, **given)
    checkpoints.wait_for_disk(run)
    return checkpoints


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# -- saving -----------------------------------------------------------------------------------


def test_what_is_written(tmp_path: Path) -> None:
    run = make_run()
    run.stage.layers[1].bias.requires_grad_(False)
    checkpoints = save(run, tmp_path)
    target = tmp_path / "global_step3"
    assert checkpoints.last == checkpoints.newest() == str(target)
    assert (tmp_path / "latest").read_text() == "global_step3"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step3", "latest"]
    manifest = Manifest.loads((target / MANIFEST_FILE).read_text())
    assert (manifest.tag, manifest.partition, manifest.num_replicas) == ("global_step3", (0, 2), 1)
    assert set(manifest.files) == set(files_of(target)) - {MANIFEST_FILE}
    for path, entry in manifest.files.items():
        folder.verify(target / path, entry)
    assert manifest.layers[1].file == "layer_01-model_states.pt"
    assert manifest.layers[1].trainable == {"weight": True, "bias": False}
    assert str(manifest.layers[1].tensors["weight"]) == "float32[2, 4]"
    assert [slot.parameter for slot in manifest.slots[0]] == ["0/weight", "0/bias", "1/weight", "1/bias"]
    assert (manifest.optimizer.kind, manifest.optimizer.name) == ("plain", "Adam")


def test_who_is_told_before_anything_is_written(tmp_path: Path) -> None:
    run = make_run()
    with patch.object(folder, "start", side_effect=lambda target: run.calls.append(("start",)) or target.mkdir()):
        with pytest.raises(CheckpointError):
            save(run, tmp_path, "a")
    assert run.calls == [("naming lost ranks", "checkpoint a was saved"), ("notice frozen layers",), ("start",)]


def test_latest_is_left_alone_if_wanted(tmp_path: Path) -> None:
    run = make_run()
    checkpoints = save(run, tmp_path, "a")
    save(run, tmp_path, "b", checkpoints, save_latest=False)
    assert (tmp_path / "latest").read_text() == "a" and checkpoints.last == str(tmp_path / "b")


def test_the_newest_one_while_another_is_saved(tmp_path: Path) -> None:
    """Until it has its name the earlier one is the newest; from then on, whatever happens, this one is."""
    run = make_run()
    checkpoints = save(run, tmp_path, "a")
    seen: list[Any] = []
    publish = folder.publish

    def note(target: Path) -> None:
        seen.append(checkpoints.newest())
        publish(target)
        seen.append(checkpoints.newest())

    with patch.object(folder, "publish", note), patch.object(folder, "write_latest", side_effect=OSError("no latest")):
        with pytest.raises(CheckpointError, match="no latest"):
            save(run, tmp_path, "b", checkpoints)
    assert seen == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert checkpoints.newest() == checkpoints.last == str(tmp_path / "a")


def test_a_failure_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    run = make_run()
    checkpoints = save(run, tmp_path, "a")
    before = files_of(tmp_path)
    run.stage.step()
    run.stage.host.checkpoint_engine.fails = RuntimeError("the cable is out")
    for tag in ("b", "a"):
        with pytest.raises(CheckpointError, match="earlier checkpoints are as they were .*the cable is out"):
            save(run, tmp_path, tag, checkpoints)
        assert files_of(tmp_path) == before and checkpoints.last == str(tmp_path / "a")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "latest"]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no folder": ({"place": ""}, ValueError, "save_dir = '': must name a folder"),
    "a tag that is taken": ({"tag": "latest"}, ValueError, "DeepSpeed keeps a file of that name"),
    "a tag outside": ({"tag": "../a"}, ValueError, "must not contain empty parts"),
    "what can't be read back": ({"client_state": {"a": iter([])}}, CheckpointError, r"client_state\['a'\] is of class"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_before_anything_is_written(what: str, tmp_path: Path) -> None:
    given, error, text = REFUSED[what]
    checkpoints = Checkpoints()
    options = {"tag": "a", **given}
    place = options.pop("place", str(tmp_path))
    with pytest.raises(error, match=text):
        save(make_run(), place, options.pop("tag"), checkpoints, **options)
    assert not list(tmp_path.iterdir()) and checkpoints.last is None


def test_a_tag_that_can_not_name_a_checkpoint_is_not_looked_for(tmp_path: Path) -> None:
    run = make_run()
    save(run, tmp_path / "inside", "a")
    run.calls.clear()
    with pytest.raises(ValueError, match="must not contain empty parts"):
        Checkpoints().load(run, str(tmp_path / "inside"), "../inside/a", ALL)
    assert run.calls == [("naming lost ranks", "checkpoint a was loaded")]


def test_what_checkpoints_do_not_cover(tmp_path: Path) -> None:
    run = make_run()
    run.stage.host.node_local = True
    for call in (lambda: save(run, tmp_path, "a"), lambda: Checkpoints().load(run, str(tmp_path), "a", ALL)):
        with pytest.raises(ValueError, match="don't cover .*use_node_local_storage.*; train without that"):
            call()
    assert not run.calls and not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_not_safe_on_the_disk_is_told_by_the_next_call(tmp_path: Path) -> None:
    run = make_run()
    for ask in ("wait", "save"):
        checkpoints = Checkpoints()
        with patch.object(folder, "sync", side_effect=OSError(5, "a bad disk")):
            checkpoints.save(run, str(tmp_path), "a", {}, save_latest=True, exclude_frozen_parameters=False)
            checkpoints._disk._pending[-1].exception()  # all were tried
        with pytest.raises(CheckpointError, match="a bad disk.*save again"):
            checkpoints.wait_for_disk(run) if ask == "wait" else save(run, tmp_path, "b", checkpoints)
        assert not (tmp_path / "b").exists() and checkpoints.last == str(tmp_path / "a")
        checkpoints.wait_for_disk(run)  # told once


# -- loading ----------------------------------------------------------------------------------


def train_on(run: FakeRun) -> None:
    """Change everything that a checkpoint holds."""
    run.stage.step()
    run.stage.counters = {"micro_offset": 0, "micro_steps": 0}
    run.stage.host.global_steps = run.stage.host.skipped_steps = 0
    run.num_batches, run.repacking.wished, run.profiler.state = 99, None, {}
    run.overhead.planning_s = 0.0
    run.calls.clear()


def test_everything_comes_back(tmp_path: Path) -> None:
    run = make_run()
    run.observe(6, [1.0, 2.0])
    run.repacking.wished, run.overhead.planning_s = 2, 0.25
    keep_in_checkpoints(run.stage.layers[0], "seen")
    run.stage.layers[0].seen = {"tokens": 5}
    before, decided = run.stage.state(), run.balancer.state_dict()
    save(run, tmp_path, "a")
    drawn = (torch.rand(3).tolist(), random.random(), numpy.random.rand())

    train_on(run)
    run.stage.layers[0].seen = {}
    run.observe(98, [3.0, 3.0])
    checkpoints = Checkpoints()
    path, values = checkpoints.load(run, str(tmp_path), None, ALL)
    assert path == str(tmp_path / "a" / "mp_rank_00_model_states.pt") and values["epoch"] == 4
    assert checkpoints.last == checkpoints.newest() == str(tmp_path / "a")
    assert same(run.stage.state(), before)
    assert (torch.rand(3).tolist(), random.random(), numpy.random.rand()) == drawn
    assert run.stage.layers[0].seen == {"tokens": 5}
    assert run.stage.counters == {"micro_offset": 5, "micro_steps": 12}
    assert (run.stage.host.global_steps, run.stage.host.skipped_steps) == (3, 1)
    assert (run.num_batches, run.overhead.planning_s) == (7, 0.25)
    assert run.balancer.state_dict() == decided
    assert (run.repacking.wished, run.repacking.same_stages) == (2, True)
    assert run.profiler.state == {"marks": 7, "sizes": [1, 2]}
    assert run.calls == [
        ("naming lost ranks", "checkpoint a was loaded"), ("move", (0, 2)), ("settle",), ("sizes changed",),
    ]  # fmt: skip


def test_only_what_is_wanted(tmp_path: Path) -> None:
    run = make_run()
    run.num_batches = 7
    weights = run.stage.layers[0].weight.detach().clone()
    save(run, tmp_path, "a")
    for wanted in (replace(ALL, optimizer_states=False), replace(ALL, module_only=True)):
        train_on(run)
        moments = {name: value for name, value in run.stage.state().items() if " " in name}
        _, values = Checkpoints().load(run, str(tmp_path), "a", wanted)
        assert torch.equal(run.stage.layers[0].weight, weights)
        assert same({name: value for name, value in run.stage.state().items() if " " in name}, moments)
        assert run.num_batches == (99 if wanted.module_only else 7)
        assert ("optimizer" in values) is not wanted.optimizer_states or wanted.module_only


def test_no_checkpoint_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, checkpoints = make_run(), Checkpoints()
    save(run, tmp_path, "a", save_latest=False)
    with caplog.at_level("WARNING", "DeepSpeed"), patch("dynpipe_ds.checkpoint.load.log.propagate", True):
        assert checkpoints.load(run, str(tmp_path), None, ALL) == (None, None)
    assert "pass a tag to load one of ['a']" in caplog.text and checkpoints.last is None
    (tmp_path / "latest").write_text(" \n")
    with pytest.raises(CheckpointError, match=r"latest can't be used: it is empty; pass one of \['a'\] as tag"):
        checkpoints.load(run, str(tmp_path), None, ALL)


def damage(place: Path) -> None:
    file = place / "a" / "layer_01-model_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_short(place: Path) -> None:
    file = place / "a" / MANIFEST_FILE
    file.write_text(file.read_text()[:-40])


def change_a_number(place: Path) -> None:
    file = place / "a" / MANIFEST_FILE
    file.write_text(file.read_text().replace('"num_replicas": 1', '"num_replicas": 2'))


NOT_USED: dict[str, tuple[Any, Any, str]] = {
    "a damaged file": (damage, None, r"layer_01-model_states.pt is damaged.*also holds \['b'\]: pass one as tag"),
    "a missing file": (lambda place: (place / "a/layer_00-model_states.pt").unlink(), None, "is missing"),
    "half a manifest": (cut_short, None, f"{MANIFEST_FILE} can't be used"),
    "a changed manifest": (change_a_number, None, "its checksum does not fit its content"),
    "other shapes": (None, lambda: Stage((3, 5, 2)), r"layer 0 .*: bias is float32\[4\] there and float32\[5\] here"),
    "more layers": (None, lambda: Stage((3, 4, 4, 2)), "holds a model of 2 layers and this one has 3"),
    "no such checkpoint": (lambda place: (place / "a").rename(place / "c"), None, r"there is no folder .*\['b', 'c'\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", NOT_USED)
def test_what_does_not_fit_changes_nothing(what: str, tmp_path: Path) -> None:
    harm, other, text = NOT_USED[what]
    run = make_run()
    save(run, tmp_path, "a")
    save(run, tmp_path, "b")
    if harm is not None:
        harm(tmp_path)
    if other is not None:
        run = make_run(other())
    train_on(run)
    before, checkpoints = run.stage.state(), Checkpoints()
    with pytest.raises(CheckpointError, match=text) as caught:
        checkpoints.load(run, str(tmp_path), "a", ALL)
    assert "nothing was changed" in str(caught.value)
    assert same(run.stage.state(), before) and run.num_batches == 99 and checkpoints.last is None
    assert run.calls == [("naming lost ranks", "checkpoint a was loaded")]


def test_another_kind_of_optimizer(tmp_path: Path) -> None:
    run = make_run()
    save(run, tmp_path, "a")
    run.stage.optimizer.groups.optimizer.__class__ = torch.optim.SGD
    with pytest.raises(CheckpointError, match="is Adam and the present one is SGD; use the same, or load_optimizer_"):
        Checkpoints().load(run, str(tmp_path), "a", ALL)


def test_layers_that_can_not_move(tmp_path: Path) -> None:
    run = make_run()
    save(run, tmp_path, "a")
    train_on(run)
    before, run.move_fails = run.stage.state(), MigrationError("rank 3 has no memory")
    with pytest.raises(CheckpointError, match="failed, nothing was changed: rank 3 has no memory"):
        Checkpoints().load(run, str(tmp_path), "a", ALL)
    assert same(run.stage.state(), before) and run.num_batches == 99


def test_a_failure_after_layers_moved_says_that_it_is_half_done(tmp_path: Path) -> None:
    run = make_run()
    save(run, tmp_path, "a")
    with patch("dynpipe_ds.checkpoint.load.restore_state", side_effect=MemoryError("full")):
        with pytest.raises(CheckpointError, match=r"are half loaded: load again \(rank 0: MemoryError: full\)"):
            Checkpoints().load(run, str(tmp_path), "a", ALL)


def test_another_number_of_stages(tmp_path: Path) -> None:
    """The partition is the present one's if nothing may choose another; what was measured on stages stays behind."""
    run = make_run()
    run.observe(6, [1.0, 2.0])
    run.repacking.wished = 2
    save(run, tmp_path, "a")
    expected = run.stage.state()
    for section, moved in (({"rebalance_every": "never"}, (0, 2, 2)), ({"allow_empty_stages": False}, (0, 1, 2))):
        longer = make_run(Stage(num_stages=2), **section)
        Checkpoints().load(longer, str(tmp_path), "a", ALL)
        assert ("move", moved) in longer.calls
        assert longer.repacking.same_stages is False and longer.num_batches == 7 and longer.profiler.state == {}
        first = {name: value for name, value in longer.stage.state().items() if name.startswith("0.")}
        assert same(first, {name: value for name, value in expected.items() if name.startswith("0.")})
