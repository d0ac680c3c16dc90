"""What goes wrong with a checkpoint is told on every rank, and changes nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from dynpipe_ds import CheckpointError
from dynpipe_ds.checkpoint import folder
from dynpipe_ds.checkpoint.manifest import MANIFEST_FILE
from dynpipe_ds.checkpoint.save import Saving
from tests.distributed.configs import ADAM, ADAMW, BF16_FP32_SUMS, ZERO
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks

RUN = Run(3, first=(0, 2, 5, 8), config={**ADAMW, **ZERO})
OPTIMIZER_FILE = "zero_pp_rank_0_mp_rank_01_optim_states.pt"
LAYER_FILE = "layer_03-model_states.pt"


def same_text(text: str) -> str:
    """The error's text, which must be the same on every rank."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    assert len(set(texts)) == 1, texts
    return text


# -- damage -----------------------------------------------------------------------------------


def missing(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def flipped(path: Path) -> None:
    """One bit in the largest record of the archive."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def emptied(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)


def of_another_layer(path: Path) -> None:
    shutil.copy(path.with_name("layer_02-model_states.pt"), path)


def edited(path: Path) -> None:
    path.write_text(path.read_text().replace('"num_replicas": 1', '"num_replicas": 2'))


def of_the_future(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (LAYER_FILE, missing, "layer_03-model_states.pt is missing"),
    (LAYER_FILE, truncated, r"layer_03-model_states.pt has \d+ bytes and was saved with \d+"),
    (LAYER_FILE, flipped, "layer_03-model_states.pt is damaged: its checksum"),
    (LAYER_FILE, emptied, "layer_03-model_states.pt is damaged"),
    (LAYER_FILE, of_another_layer, "layer_03-model_states.pt (is damaged|has)"),
    (OPTIMIZER_FILE, missing, "optim_states.pt is missing"),
    (OPTIMIZER_FILE, truncated, "optim_states.pt has"),
    (OPTIMIZER_FILE, flipped, "optim_states.pt is damaged"),
    ("mp_rank_02_model_states.pt", missing, "mp_rank_02_model_states.pt is missing"),
    ("dynamic_pipeline/common.pt", missing, "common.pt is missing"),
    ("dynamic_pipeline/stage_001_replica_000.pt", truncated, "stage_001_replica_000.pt has"),
    ("dynamic_pipeline.json", truncated, "dynamic_pipeline.json can't be used"),
    ("dynamic_pipeline.json", edited, "dynamic_pipeline.json can't be used: its checksum does not fit"),
    ("dynamic_pipeline.json", of_the_future, "its version is 99 and this release reads 1"),
]


def load_damaged(rank: int, place: str) -> None:
    engine = make_engine(RUN)
    batches = data(0, RUN.micro_batches)
    for _ in range(2):
        engine.train_batch(batches)
    engine.save_checkpoint(place, tag="good")
    engine.repartition((0, 1, 6, 8))
    engine.train_batch(batches)
    before = digest(engine), engine.partition, engine.global_steps
    for file, damage, message in DAMAGES:
        if rank == 0:
            shutil.copytree(f"{place}/good", f"{place}/bad")
            damage(Path(place, "bad", file))
        dist.barrier()
        with pytest.raises(CheckpointError, match=message) as caught:
            engine.load_checkpoint(place, "bad")
        same_text(str(caught.value))
        assert "nothing was changed" in str(caught.value)
        assert file == MANIFEST_FILE or f"{place} also holds ['good']: pass one as tag" in str(caught.value)
        assert (digest(engine), engine.partition, engine.global_steps) == before, file
        if rank == 0:
            shutil.rmtree(f"{place}/bad")
    with pytest.raises(CheckpointError, match=r"there is no folder .*absent; its parent holds \['good'\]"):
        engine.load_checkpoint(place, "absent")
    assert engine.load_checkpoint(f"{place}/nowhere") == (None, None)
    dist.barrier()
    if rank == 0:
        Path(place, "latest").write_text("")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"latest can't be used: it is empty; pass one of \['good'\] as tag"):
        engine.load_checkpoint(place)
    dist.barrier()
    if rank == 0:
        Path(place, "latest").write_text("good")
    dist.barrier()
    engine.train_batch(batches)
    engine.load_checkpoint(place)
    assert engine.partition == (0, 2, 5, 8) and engine.global_steps == 2


def test_damage_is_named_on_every_rank(tmp_path: Path) -> None:
    run_ranks(load_damaged, 3, str(tmp_path))


MISFITS: dict[str, tuple[Run, str]] = {
    "more layers": (replace(RUN, num_blocks=7, first=(0, 2, 5, 9)), "of 8 layers and this one has 9"),
    "tied": (replace(RUN, tied=True), r"layer_07.*does not fit layer 7 \(Embed\): it lacks \['weight'\] and has"),
    "bf16": (
        replace(RUN, config={**ADAMW, **BF16_FP32_SUMS}),
        r"does not fit layer . \((Embed|Block)\): .* is float32\[.*\] there and bfloat16\[.*\] here; train in the",
    ),
    "no ZeRO": (replace(RUN, config=ADAMW), "under ZeRO-1 or bf16 and the present one is without ZeRO; use the same"),
    "plain Adam": (replace(RUN, config={**ADAM, **ZERO}), "is AdamW and the present one is Adam; use the same"),
}


class Wider:
    """A stand-in that makes the third block of another width."""

    def __enter__(self) -> None:
        from tests.distributed import models

        original = models.layers_of

        def layers_of(run: Run) -> Any:
            layers = original(run)
            layers[3] = models.LayerSpec(models.Block, 64)
            return layers

        self.patch = patch.object(models, "layers_of", layers_of)
        self.patch.start()

    def __exit__(self, *_: Any) -> None:
        self.patch.stop()


def load_misfits(rank: int, place: str) -> None:
    engine = make_engine(RUN)
    engine.train_batch(data(0, RUN.micro_batches))
    engine.save_checkpoint(place, tag="good")
    wider = RUN, r"layer_03.* does not fit layer 3 \(Block\): down.weight is float32\[16, 48\] there and .*\[16, 64\]"
    for name, (run, message) in {**MISFITS, "wider": wider}.items():
        with Wider() if name == "wider" else nullcontext():
            other = make_engine(run)
        before = digest(other)
        with pytest.raises(CheckpointError, match=message) as caught:
            other.load_checkpoint(place)
        same_text(str(caught.value))
        assert digest(other) == before
        assert other.partition == run.first


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run_ranks(load_misfits, 3, str(tmp_path))


# -- failures while saving --------------------------------------------------------------------


@contextmanager
def failing(owner: Any, name: str, *, call: int = 1, after: bool = False) -> Iterator[None]:
    """Make one call of a function fail, before or after it did its work."""
    original, calls = getattr(owner, name), iter(range(1, 10**6))

    def run(*args: Any, **kwargs: Any) -> Any:
        fails = next(calls) == call
        result = original(*args, **kwargs) if after or not fails else None
        if fails:
            raise OSError(28, "No space left on device")
        return result

    with patch.object(owner, name, run):
        yield


def without_exchange() -> Any:
    return patch.object(folder, "_exchange", lambda one, other: False)


# rank, where, whether the new checkpoint is there all the same
POINTS: list[tuple[int, Callable[[], Any], bool]] = [
    *((rank, lambda call=call: failing(torch, "save", call=call), False) for rank in range(3) for call in (1, 3)),
    (2, lambda: failing(folder, "fingerprint"), False),
    (0, lambda: failing(folder, "start"), False),
    (0, lambda: failing(folder, "start", after=True), False),
    (1, lambda: failing(Saving, "_write_our_files"), False),
    (2, lambda: failing(Saving, "_describe"), False),
    (0, lambda: failing(Path, "write_text"), False),
    (0, lambda: failing(Path, "write_text", after=True), False),
    (0, lambda: failing(Path, "write_text", call=2), True),
    (0, lambda: failing(folder, "publish"), False),
    (0, lambda: failing(folder, "publish", after=True), True),
    (0, lambda: failing(os, "rename"), False),
    (0, lambda: failing(os, "rename", after=True), True),
    (0, lambda: failing(folder, "write_latest"), True),
    (0, lambda: failing(os, "replace"), True),
]
REPLACING: list[tuple[int, Callable[[], Any], bool]] = [
    (0, lambda: failing(folder, "_exchange"), False),
    (0, lambda: failing(folder, "_exchange", after=True), True),
    (0, lambda: failing(shutil, "rmtree", call=1), True),
]


def save_through_failures(rank: int, place: str) -> list[float]:
    """Saving fails at every point in turn; the earlier checkpoint stays, and training goes on."""
    engine = make_engine(RUN)
    batches = data(0, RUN.micro_batches)
    losses = [float(engine.train_batch(batches))]
    engine.save_checkpoint(place, tag="old")
    old = digest(engine)
    losses.append(float(engine.train_batch(batches)))
    other = make_engine(RUN)

    for i, (where, sabotage, there) in enumerate(POINTS):
        with sabotage() if rank == where else nullcontext(), pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(place, tag="new")
        text = same_text(str(caught.value))
        assert f"rank {where}: CheckpointError: {place}" in text and "the disk is full: " in text, (i, text)
        dist.barrier()
        folders = sorted(f.name for f in Path(place).iterdir() if f.is_dir())
        assert folders == ["new", "old"][not there :], (i, folders)
        assert Path(place, "latest").read_text() == "old", i
        other.load_checkpoint(place)
        assert digest(other) == old, i
        if there:
            other.load_checkpoint(place, "new")
            assert digest(other) == digest(engine), i
        dist.barrier()
        if rank == 0:
            shutil.rmtree(Path(place, "new"), ignore_errors=True)
        losses.append(float(engine.train_batch(batches)))
    return losses


def replace_through_failures(rank: int, place: str) -> None:
    """A checkpoint is overwritten by one of the same name; that fails, in each of two ways of replacing."""
    engine = make_engine(RUN)
    batches = data(0, RUN.micro_batches)
    engine.train_batch(batches)
    engine.save_checkpoint(place, tag="same")
    old = digest(engine)
    other = make_engine(RUN)
    attempts = [(point, nullcontext) for point in REPLACING]
    attempts += [((0, lambda call=call: failing(os, "rename", call=call), False), without_exchange) for call in (1, 2)]
    for i, ((where, sabotage, there), way) in enumerate(attempts):
        engine.train_batch(batches)
        with way(), sabotage() if rank == where else nullcontext(), pytest.raises(CheckpointError) as caught:
            engine.save_checkpoint(place, tag="same")
        same_text(str(caught.value))
        dist.barrier()
        old = digest(engine) if there else old
        other.load_checkpoint(place)
        assert digest(other) == old, i
        dist.barrier()
    with without_exchange():
        engine.save_checkpoint(place, tag="same")
    other.load_checkpoint(place)
    assert digest(other) == digest(engine)
    dist.barrier()
    if rank == 0:  # killed between the two renames that replace a checkpoint
        os.rename(f"{place}/same", f"{place}/.same.replaced")
    dist.barrier()
    other.load_checkpoint(place)
    engine.save_checkpoint(place, tag="same")
    assert sorted(f.name for f in Path(place).iterdir() if f.is_dir()) == ["same"]


def save_through_and_without_failures(rank: int, place: str) -> tuple[list[float], list[float]]:
    losses = save_through_failures(rank, place)
    engine, batches = make_engine(RUN), data(0, RUN.micro_batches)
    return losses, [float(engine.train_batch(batches)) for _ in losses]


def test_a_save_that_fails_leaves_the_last_one_and_training_goes_on(tmp_path: Path) -> None:
    through, undisturbed = run_ranks(save_through_and_without_failures, 3, str(tmp_path))[0]
    assert through == undisturbed


def test_replacing_a_checkpoint_never_loses_it(tmp_path: Path) -> None:
    run_ranks(replace_through_failures, 3, str(tmp_path))


def save_while_the_disk_fails(rank: int, place: str) -> None:
    """Every process lives, so the checkpoint is complete; that it is not on the disk is told by the next call."""
    engine = make_engine(RUN)
    engine.train_batch(data(0, RUN.micro_batches))
    for tag, then in (("first", lambda: engine.save_checkpoint(place, tag="other")), ("second", engine.wait_for_disk)):
        with failing(folder, "sync", call=2) if rank == 1 else nullcontext():
            engine.save_checkpoint(place, tag=tag)
            with pytest.raises(CheckpointError, match=f"rank 1: .*{place}/{tag}/.*No space left") as caught:
                then()
        assert f"checkpoint {place}/{tag} may be lost if this machine fails: save again" in same_text(str(caught.value))
        dist.barrier()
        assert Path(place, "latest").read_text() == tag
    engine.wait_for_disk()
    engine.save_checkpoint(place, tag="third")
    engine.wait_for_disk()
    engine.load_checkpoint(place)
    assert not Path(place, "other").exists()


def test_a_checkpoint_that_does_not_reach_the_disk_is_reported(tmp_path: Path) -> None:
    run_ranks(save_while_the_disk_fails, 3, str(tmp_path))
