"""Checkpoints of what replicas own: into another cut, another number of replicas, and with the whole on all of them."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dynpipe_ds import CheckpointError
from dynpipe_ds.checkpoint.manifest import MANIFEST_FILE, Manifest
from dynpipe_ds.owning import is_owned
from tests.distributed.configs import ADAMW, BF16, BF16_FP32_SUMS, CLIP, SGD, WARMUP, ZERO
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.owned import Own, Shared, Whole
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

MODES: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "sgd": SGD,
    "zero1": {**ADAMW, **ZERO},
    "bf16": {**ADAMW, **BF16},
    "bf16_zero1_fp32_sums": {**ADAMW, **BF16_FP32_SUMS},
}
BATCHES, SAVED_AFTER, MICRO_BATCHES = 5, 3, 12  # micro-batches of all replicas together
SHARED = {1: Shared, 4: Shared}
Bits = dict[str, str]


def make_run(mode: str, stages: int, replicas: int, special: dict[int, type], first: tuple[int, ...]) -> Run:
    return Run(
        stages, config={**MODES[mode], **CLIP, **WARMUP}, special=special, first=first,
        micro_batches=MICRO_BATCHES // replicas,
    )


def batches_of(engine: Any, skipped: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """One replica's micro-batches, so that all replicas together see the same batch, however many they are."""
    stream, each = data(0, MICRO_BATCHES), MICRO_BATCHES // engine.grid.get_data_parallel_world_size()
    replica = engine.grid.get_data_parallel_id()
    for number in itertools.count():
        batch = [next(stream) for _ in range(MICRO_BATCHES)]
        if number >= skipped:
            yield from batch[replica * each : (replica + 1) * each]


def whole_rows(engine: Any) -> Bits:
    """Digests of the whole of which replicas own rows, of weights and each part of their optimizer state."""
    group, found = engine.grid.get_data_parallel_group(), {}
    for index, layer in engine.local_layers().items():
        for name, parameter in layer.named_parameters():
            if not name.endswith("rows"):
                continue
            state = engine.stage_optimizer.export([parameter])[0]
            for key, value in {"weight": parameter.detach(), **state}.items():
                tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
                tensor = tensor.detach().float().reshape(-1).contiguous()
                parts = [tensor]
                if is_owned(parameter) and tensor.numel() > 1:
                    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
                    dist.all_gather(parts, tensor, group=group)
                found[f"{index}.{name}.{key}"] = hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()
    return found


def save_in_the_middle(_rank: int, run: Run, folder: str) -> tuple[list[float], Bits, Bits, Bits]:
    engine = make_engine(run)
    batches, losses = batches_of(engine), []
    for batch in range(BATCHES):
        if batch == 2:
            engine.repartition((0, 3, 8))
        if batch == SAVED_AFTER:
            engine.save_checkpoint(folder)
            rows, at_save = whole_rows(engine), digest(engine)
        losses.append(float(engine.train_batch(batches)))
    return losses, at_save, digest(engine), rows


def load_and_go_on(_rank: int, run: Run, folder: str) -> tuple[list[float], Bits, Bits, Bits]:
    engine = make_engine(run)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    rows, at_load = whole_rows(engine), digest(engine)
    batches = batches_of(engine, SAVED_AFTER)
    losses = [float(engine.train_batch(batches)) for _ in range(BATCHES - SAVED_AFTER)]
    return losses, at_load, digest(engine), rows


def merged(results: list[Any], which: int, replica: int = 0, replicas: int = 1) -> dict[str, Any]:
    return {layer: h for rank in results[replica::replicas] for layer, h in rank[which].items()}


@pytest.mark.parametrize(
    ("mode", "replicas", "stages"),
    mostly(
        [(mode, replicas, stages) for mode in MODES for replicas in (1, 2, 3) for stages in (1, 2, 3)],
        [("adamw", 2, 1), ("zero1", 2, 2)],
    ),
)
def test_another_cut_goes_on_with_the_same_bits(tmp_path: Path, mode: str, replicas: int, stages: int) -> None:
    special: dict[int, type] = {1: Shared, 4: Own}
    before = make_run(mode, 2, replicas, special, (0, 4, 8))
    saved = run_ranks(save_in_the_middle, 2 * replicas, before, str(tmp_path))
    first = {1: (0, 8), 2: (0, 6, 8), 3: (0, 2, 4, 8)}[stages]
    loaded = run_ranks(
        load_and_go_on, stages * replicas, replace(before, num_stages=stages, first=first), str(tmp_path)
    )
    assert [rank[0] for rank in loaded[:1]] == [rank[0][SAVED_AFTER:] for rank in saved[:1]]
    for replica in range(replicas):
        for which in (1, 2):
            assert merged(loaded, which, replica, replicas) == merged(saved, which, replica, replicas)


@pytest.mark.parametrize(
    ("mode", "before", "after"),
    mostly(
        [*itertools.product(MODES, [2], [1, 4]), *itertools.product(MODES, [1], [2]), ("adamw", 4, 2), ("zero1", 4, 1),
         ("zero1", 3, 2), ("bf16", 2, 3)],
        [("adamw", 2, 1), ("zero1", 1, 2), ("zero1", 3, 2)],
    ),
)  # fmt: skip
def test_another_number_of_replicas_gets_other_rows(tmp_path: Path, mode: str, before: int, after: int) -> None:
    run = make_run(mode, 2, before, SHARED, (0, 4, 8))
    saved = run_ranks(save_in_the_middle, 2 * before, run, str(tmp_path))
    run = make_run(mode, 1, after, SHARED, (0, 8))
    loaded = run_ranks(load_and_go_on, after, run, str(tmp_path))
    assert merged(loaded, 3) == merged(saved, 3, 0, before), "weights and state of all rows"
    if mode in ("adamw", "sgd", "zero1"):  # sums over replicas have another order
        assert loaded[0][0] == pytest.approx(saved[0][0][SAVED_AFTER:], rel=2e-5)


@pytest.mark.parametrize(("before", "after"), [(SHARED, {1: Whole, 4: Whole}), ({1: Whole, 4: Whole}, SHARED)])
def test_rows_become_a_whole_and_a_whole_rows(
    tmp_path: Path, before: dict[int, type], after: dict[int, type]
) -> None:
    run = make_run("adamw", 2, 2, before, (0, 4, 8))
    saved = run_ranks(save_in_the_middle, 4, run, str(tmp_path))
    loaded = run_ranks(load_and_go_on, 4, replace(run, special=after), str(tmp_path))
    assert merged(loaded, 3) == merged(saved, 3, 0, 2)
    assert loaded[0][0] == pytest.approx(saved[0][0][SAVED_AFTER:], rel=2e-6), "the norm is added up otherwise"


# -- what does not fit ------------------------------------------------------------------------


class Narrow(Shared):
    """Has half the rows."""

    def __init__(self) -> None:
        super().__init__()
        mark = self.rows.owned_by_replica
        self.rows = nn.Parameter(self.rows.detach()[: len(self.rows) // 2].clone())
        self.rows.owned_by_replica = mark


def load_what_does_not_fit(_rank: int, run: Run, folder: str) -> tuple[str, bool]:
    engine = make_engine(run)
    before = digest(engine)
    try:
        engine.load_checkpoint(folder)
    except CheckpointError as error:
        return str(error), digest(engine) == before
    return "", False


def refused(run: Run, folder: Path) -> str:
    replicas = 2
    results = run_ranks(load_what_does_not_fit, run.num_stages * replicas, run, str(folder))
    assert all(unchanged for _, unchanged in results), "nothing was changed"
    assert len({text for text, _ in results}) == 1
    return results[0][0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("owned")
    run_ranks(save_in_the_middle, 4, make_run("zero1", 2, 2, SHARED, (0, 4, 8)), str(folder))
    return folder


def copy_of(saved: Path, place: Path) -> Path:
    import shutil

    shutil.copytree(saved, place)
    return place


def test_another_number_of_rows_is_refused(saved: Path) -> None:
    run = make_run("zero1", 2, 2, {1: Narrow, 4: Shared}, (0, 4, 8))
    assert "rows is float32[12, 16] there and float32[6, 16] here, over all replicas" in refused(run, saved)


@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_replicas_file_that_is_not_as_it_was_is_refused(saved: Path, tmp_path: Path, damage: str) -> None:
    place = copy_of(saved, tmp_path / "copy")
    (file,) = place.glob("global_step3/dynamic_pipeline/layer_05-replica_001.pt")
    if damage == "missing":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        start = content.index(torch.load(file, weights_only=True)["weights"]["rows"].numpy().tobytes())
        content[start] ^= 1
        file.write_bytes(content)
    text = refused(make_run("zero1", 2, 2, SHARED, (0, 4, 8)), place)
    assert "layer_05-replica_001.pt is " + damage in text


def test_what_is_written(saved: Path) -> None:
    """A file for each layer and replica, named in a manifest that earlier releases refuse; state once."""
    root = saved / "global_step3"
    text = (root / MANIFEST_FILE).read_text()
    assert '"version": 2' in text
    manifest = Manifest.loads(text)
    assert [sorted(entry.owned) for entry in manifest.layers] == [[], [], ["rows"], [], [], ["rows"], [], []]
    for layer in (2, 5):
        files = manifest.layers[layer].owned["rows"]
        assert files == tuple(f"dynamic_pipeline/layer_{layer:02d}-replica_{r:03d}.pt" for r in range(2))
        for file in files:
            content = torch.load(root / file, weights_only=True)
            assert content["weights"]["rows"].shape == (6, 16)
            state = content["optimizer"]["rows"]
            assert {"master", "exp_avg", "exp_avg_sq"} <= state.keys() and state["exp_avg"].numel() == 96
    for files in manifest.optimizer_files:
        for file in files:
            shard = torch.load(root / file, weights_only=False)["optimizer_state_dict"]
            assert [t.numel() > 0 for t in shard["single_partition_of_fp32_groups"]] == [True, False], "state once"


