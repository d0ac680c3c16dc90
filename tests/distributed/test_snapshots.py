"""Going back to a snapshot and repeating the batches since gives the bits of a run in which that never happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynpipe_ds import ParameterReplacement
from dynpipe_ds.snapshots import transfer
from dynpipe_ds.snapshots.inventory import Seat
from dynpipe_ds.snapshots.restore import newest, restore
from tests.distributed.configs import ADAMW, BF16_FP32_SUMS, CLIP, FP16, SGD, WARMUP, ZERO
from tests.distributed.models import Block, Run, data, digest, make_engine
from tests.distributed.owned import Own
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

EVERY, BACK, BATCHES = 4, 7, 9

CONFIGS: dict[str, dict[str, Any]] = {
    "adamw": ADAMW,
    "sgd": SGD,
    "zero1": {**ADAMW, **ZERO},
    "bf16_zero1": {**ADAMW, **BF16_FP32_SUMS},
    "fp16_zero1": {**ADAMW, **ZERO, **FP16},
}


def surviving(run: Run, **keys: Any) -> Run:
    section = {"enabled": True, "rebalance_every": "never", "survive": {"enabled": True, **keys}}
    return replace(run, config={**run.config, "dynamic_pipeline": {**section, **run.config.get("section", {})}})


def train(engine: Any, batches: Any, number: int) -> list[float]:
    return [float(engine.train_batch(batches)) for _ in range(number)]


def undisturbed(_rank: int, run: Run, *, prepare: Callable[[Any], object] = id) -> dict[str, Any]:
    engine = make_engine(run)
    prepare(engine)
    batches = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    losses = train(engine, batches, EVERY)
    then = digest(engine)
    losses += train(engine, batches, BATCHES - EVERY)
    return {"losses": losses, "then": then, "end": digest(engine), "rates": engine.get_lr()}


def wipe(engine: Any, rank: int, wiped: int | None) -> None:
    """Let a rank lose its memory: its own copies, the one that it holds, its weights, its optimizer's state."""
    if rank == wiped:
        engine.dynamic.snapshots.store.forget()
        for layer in engine.local_layers().values():
            for parameter in layer.parameters():
                parameter.data.fill_(7.0)
        engine.dynamic.pipeline.reading.kept.forget_before(10**9)


def going_back(
    rank: int, run: Run, wiped: int | None, boundaries: tuple[int, ...] | None, *,
    prepare: Callable[[Any], object] = id,
) -> dict[str, Any]:
    engine = make_engine(run)
    prepare(engine)
    training = engine.dynamic
    batches = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    losses = train(engine, batches, BACK)
    training.snapshots.pause()
    wipe(engine, rank, wiped)
    batch = newest(training)
    restore(training, batch, boundaries)
    then = digest(engine)
    losses_again = []
    run_batch = training.pipeline.run_batch
    training.pipeline.run_batch = lambda: losses_again.append(float(run_batch()))
    training.repeating.replay(BACK)
    losses += train(engine, batches, BATCHES - BACK)
    return {
        "losses": losses, "then": then, "end": digest(engine), "rates": engine.get_lr(), "batch": batch,
        "again": losses_again, "partition": engine.partition,
    }


def both(rank: int, run: Run, wiped: int | None, boundaries: tuple[int, ...] | None) -> list[dict[str, Any]]:
    plain = replace(run, config={k: v for k, v in run.config.items() if k != "section"})
    return [undisturbed(rank, plain), going_back(rank, surviving(run, snapshot_every=EVERY), wiped, boundaries)]


def by_layer(ranks: list[dict[str, Any]], key: str, replicas: int) -> list[dict[str, str]]:
    """Digests of every layer, by replica; rank = stage * replicas + replica."""
    return [
        {layer: value for rank in ranks[replica::replicas] for layer, value in rank[key].items()}
        for replica in range(replicas)
    ]


def check(
    run: Run, *, replicas: int = 1, wiped: int | None = None, boundaries: tuple[int, ...] | None = None,
    function: Callable[..., list[dict[str, Any]]] = both,
) -> list[dict[str, Any]]:
    results = run_ranks(function, run.num_stages * replicas, run, wiped, boundaries)
    plain, back = [r[0] for r in results], [r[1] for r in results]
    assert {r["batch"] for r in back} == {EVERY}
    assert boundaries is None or {r["partition"] for r in back} == {boundaries}
    for one, other in zip(plain, back, strict=True):
        assert all(loss == loss for loss in one["losses"])
        assert other["losses"] == one["losses"]
        assert other["again"] == one["losses"][EVERY:BACK]
        assert other["rates"] == one["rates"]
    for key in ("then", "end"):
        assert by_layer(back, key, replicas) == by_layer(plain, key, replicas), key
    return back


@pytest.mark.parametrize("config", mostly(CONFIGS, ["bf16_zero1"]))
def test_everybody_goes_back(config: str) -> None:
    check(Run(num_stages=3, config={**CONFIGS[config], **CLIP, **WARMUP}, dropout=0.2))


@pytest.mark.parametrize(("config", "wiped"), mostly(
    [(config, wiped) for config in CONFIGS for wiped in range(3)], [("adamw", 0)],
))  # fmt: skip
def test_a_rank_that_lost_its_memory_takes_its_neighbours_copy(config: str, wiped: int) -> None:
    check(Run(num_stages=3, config={**CONFIGS[config], **CLIP, **WARMUP}, dropout=0.2), wiped=wiped)


@pytest.mark.parametrize(("config", "wiped"), mostly(
    [(config, wiped) for config in CONFIGS for wiped in range(4)],
    [("zero1", 2), ("bf16_zero1", 3)],
))  # fmt: skip
def test_replicas_hold_what_they_share_and_neighbours_the_shards(config: str, wiped: int) -> None:
    check(Run(num_stages=2, config={**CONFIGS[config], **CLIP}), replicas=2, wiped=wiped)


@pytest.mark.parametrize(("config", "replicas"), mostly(
    [(config, replicas) for config in CONFIGS for replicas in (1, 2)],
    [("adamw", 1), ("zero1", 2)],
))  # fmt: skip
def test_into_another_partition_with_a_lost_memory(config: str, replicas: int) -> None:
    run = Run(num_stages=4 // replicas, config={**CONFIGS[config], **CLIP})
    check(run, replicas=replicas, wiped=1, boundaries=(0, 5, 6, 7, 8) if replicas == 1 else (0, 6, 8))


@pytest.mark.parametrize(("config", "boundaries"), mostly(
    [(config, boundaries) for config in CONFIGS for boundaries in (None, (0, 1, 7, 8))],
    [("adamw", (0, 1, 7, 8))],
))  # fmt: skip
def test_tied_layers(config: str, boundaries: tuple[int, ...] | None) -> None:
    check(Run(num_stages=3, tied=True, config={**CONFIGS[config], **CLIP}), wiped=0, boundaries=boundaries)


@pytest.mark.parametrize("config", mostly(["adamw", "bf16_zero1"], ["adamw"]))
def test_planned_orders_and_functions_as_layers(config: str) -> None:
    run = Run(num_stages=3, functions=True, config={**CONFIGS[config], "section": {"schedule": "planned"}})
    check(run, wiped=2)


class Changes:
    """Changes layers between batches: freezes one, gives another's weight another shape, zeroes parts of a third."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.seen: list[int] = []

    def before_batch(self, batch: int) -> None:
        self.seen.append(batch)
        layers = self.engine.local_layers()
        if batch in (3, 5) and 1 in layers:
            layers[1].requires_grad_(batch == 5)
        if batch in (2, 6):
            there = [layers[i] for i in (4, 7) if i in layers and isinstance(layers[i], Block)]
            self.engine.replace_parameters([reshaped(layer) for layer in there])
        if batch in (4, 5, 6) and 2 in layers:
            layers[2].down.weight.data[batch] = 0.0
            layers[2].note = torch.rand(3)

    def after_batch(self, batch: int) -> None:
        assert self.seen[-1] == batch

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = list(state["seen"])


def reshaped(layer: Block) -> ParameterReplacement:
    """The weight with as many elements, flat or not flat any more; the block computes with it either way."""
    weight, rows = layer.up.weight, layer.up.out_features
    change = torch.flatten if weight.dim() == 2 else (lambda t: t.view(rows, -1))
    return ParameterReplacement(layer.up, "weight", nn.Parameter(change(weight.detach().clone())), change)


class AnyShape(Block):
    """A block whose first weight may be flat."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.up.weight.view(self.up.out_features, -1)
        up = nn.functional.linear(self.norm(x), weight, self.up.bias)
        return x + self.down(torch.tanh(up))


def with_changes(rank: int, run: Run, wiped: int | None, boundaries: tuple[int, ...] | None) -> list[dict[str, Any]]:
    results = []
    plain = replace(run, config={**run.config, "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"}})
    for each, function in ((plain, undisturbed), (surviving(run, snapshot_every=EVERY), going_back)):
        changes: list[Changes] = []

        def prepare(engine: Any, changes: list[Changes] = changes) -> None:
            changes.append(engine.between_batches(Changes(engine)))

        results.append(function(rank, each, *(() if each is plain else (wiped, boundaries)), prepare=prepare))
        results[-1]["seen"] = changes[0].seen
    return results


@pytest.mark.parametrize(("config", "wiped", "boundaries"), mostly(
    [(c, w, b) for c in ("adamw", "zero1", "bf16_zero1") for w in (0, 1, 2) for b in (None, (0, 1, 7, 8))],
    [("bf16_zero1", 1, (0, 1, 7, 8))],
))  # fmt: skip
def test_what_changes_between_batches_is_repeated(
    config: str, wiped: int, boundaries: tuple[int, ...] | None
) -> None:
    run = Run(num_stages=3, config=CONFIGS[config], special={i: AnyShape for i in range(6)})
    results = check(run, wiped=wiped, boundaries=boundaries, function=with_changes)
    assert {tuple(r["seen"]) for r in results} == {tuple(range(BATCHES))}


@pytest.mark.parametrize(("config", "wiped"), mostly(
    [(config, wiped) for config in ("adamw", "zero1", "bf16_zero1") for wiped in range(4)],
    [("bf16_zero1", 1)],
))  # fmt: skip
def test_what_single_replicas_own(config: str, wiped: int) -> None:
    run = Run(num_stages=2, config=CONFIGS[config], special={1: Own, 4: Own})
    check(run, replicas=2, wiped=wiped)


def test_no_copy_spans_an_optimizer_step() -> None:
    """Threads that copy late are waited for before the step, and what forwards change is copied before them."""
    check(Run(num_stages=2, config=ADAMW), function=copying_late)


def copying_late(rank: int, *args: Any) -> list[dict[str, Any]]:
    copy_all = transfer.copy_all

    def late(*given: Any) -> None:
        time.sleep(0.3)
        copy_all(*given)

    transfer.copy_all = late
    return both(rank, *args)


def held(_rank: int, run: Run) -> list[tuple[Any, ...]]:
    engine = make_engine(run)
    batches = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    train(engine, batches, EVERY + 1)
    engine.dynamic.snapshots.pause()
    overhead = engine.overhead.snapshots_s
    kept = engine.dynamic.pipeline.reading.kept
    train(engine, batches, 1)
    inventory = engine.dynamic.snapshots.inventory()
    return [(s.batch, s.owner, s.is_whole, s.is_complete, s.num_bytes) for s in inventory] + [(overhead, kept.oldest)]


@pytest.mark.parametrize("zero", [False, True])
def test_a_neighbour_holds_no_more_than_is_needed(zero: bool) -> None:
    run = surviving(Run(num_stages=2, config={**ADAMW, **(ZERO if zero else {})}), snapshot_every=EVERY)
    for rank, found in enumerate(run_ranks(held, 4, run)):
        *copies, (overhead, oldest) = found
        assert overhead > 0
        assert oldest == EVERY, "what a snapshot covers is kept no longer"
        own = next(c for c in copies if c[1] == Seat(rank // 2, rank % 2))
        theirs = next(c for c in copies if c[1] != Seat(rank // 2, rank % 2))
        assert (own[0], own[2], own[3]) == (EVERY, True, True)
        assert (theirs[0], theirs[2], theirs[3]) == (EVERY, False, True)
        assert theirs[1] == Seat(*divmod((rank - 1) % 4, 2))
        buffers = theirs[4] < 2000
        assert buffers is not zero, "without ZeRO all but buffers is on the other replica"
