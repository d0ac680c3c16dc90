"""All or nothing: when one rank can't do its part of a move, no rank has changed."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from dynpipe_ds import MigrationError, RankLostError
from dynpipe_ds.host.optimizers.groups import ParameterGroups
from dynpipe_ds.migration import migrate
from dynpipe_ds.ranks.cross_memory import CrossMemory, Piece, cross_memory
from tests.distributed.configs import CLIP, CROSS_MEMORY, EVEN, OPTIMIZERS, WARMUP
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly

FIRST, TARGET, LATER = EVEN[3], (0, 1, 4, 8), (0, 5, 6, 8)
TARGETS = {FIRST: TARGET, (0, 5, 8): (0, 3, 8)}
LATERS = {FIRST: LATER, (0, 5, 8): (0, 6, 8)}


# -- ways to fail on one rank -----------------------------------------------------------------


def fails_once(original: Callable[..., Any], *, after: bool) -> Callable[..., Any]:
    """A function that fails when it is first called, before or after doing its work."""
    calls = iter(range(1, 1000))

    def run(*args: Any, **kwargs: Any) -> Any:
        fails = next(calls) == 1
        result = original(*args, **kwargs) if after or not fails else None
        if fails:
            raise MemoryError("no room left here")
        return result

    return run


@contextmanager
def unpicklable_layer(engine: Any) -> Iterator[None]:
    layer = engine.local_layers()[4]
    layer.guard = (x for x in ())
    try:
        yield
    finally:
        del layer.guard


def replaced(owner: Callable[[Any], Any], name: str, *, after: bool) -> Callable[[Any], Any]:
    """Make a method fail before it does its work, or after it did it."""

    def sabotage(engine: Any) -> AbstractContextManager[Any]:
        target = owner(engine)
        return patch.object(target, name, fails_once(getattr(target, name), after=after))

    return sabotage


def wrapper_of(engine: Any) -> str:
    """Where the engine builds a flat optimizer."""
    return "_configure_bf16_optimizer" if engine.bfloat16_enabled() else "_configure_zero_optimizer"


def sabotages(engine: Any) -> dict[str, tuple[int, Callable[[Any], AbstractContextManager[Any]], str]]:
    """What fails, by name: on which rank, how, and what the message says."""
    receiver = 1 if engine.num_stages == 3 else 3
    found: dict[str, tuple[int, Any, str]] = {
        "pack": (1, unpicklable_layer, "rank 1: PackingError: layer 4 (Block) can't be carried to"),
        "allocate": (2, replaced(lambda _: migrate, "make_room", after=False), "rank 2: MemoryError: no"),
        "unpack": (receiver, replaced(lambda _: migrate, "unpack", after=True), f"rank {receiver}: MemoryError: no"),
    }
    steps = [
        (0, "module", lambda e: e.module, "install"),
        (1, "prepare", lambda e: e.stage_optimizer, "prepare"),
        (2, "groups", lambda _: ParameterGroups, "install"),
    ]
    if engine.zero_optimization():
        steps.append((1, "wrap", lambda e: e, wrapper_of(engine)))
    steps.append((1, "fill", lambda e: e.stage_optimizer, "fill"))
    steps += [(r, m, lambda e: e.stage_optimizer, m) for r, m in ((1, "describe"), (2, "make_buffers"))]
    if engine.zero_optimization() and engine.grid.data_parallel_size > 1:  # one replica alone
        alone = (3, "places"), (0, "parts"), (3, "_check_layout")
        steps += [(r, m, lambda e: e.stage_optimizer, m) for r, m in alone]
    for rank, what, owner, method in steps:
        for after in (False, True):
            text = f"rank {rank}: MemoryError: no room left here"
            found[f"{what}, {after}"] = (rank, replaced(owner, method, after=after), text)
    return found


@contextmanager
def once(engine: Any, rank: int, sabotage: Callable[[Any], AbstractContextManager[Any]]) -> Iterator[None]:
    """Sabotage one rank only."""
    if dist.get_rank() != rank:
        yield
        return
    with sabotage(engine):
        yield


def refuse(engine: Any, rank: int, sabotage: Any) -> str:
    with once(engine, rank, sabotage), pytest.raises(MigrationError) as caught:
        engine.repartition(TARGETS[engine.partition])
    return str(caught.value)


# -- the runs ---------------------------------------------------------------------------------


def train_through_failures(_rank: int, run: Run) -> dict[str, Any]:
    """Before every batch one attempt to move fails; then one succeeds, and another."""
    engine = make_engine(run)
    batches, losses, texts = data(engine.grid.get_data_parallel_id(), run.micro_batches), [], {}
    losses.append(float(engine.train_batch(batches)))
    for name, (rank, sabotage, text) in sabotages(engine).items():
        before = digest(engine), engine.param_names.copy(), [id(m) for m in engine.local_layers().values()]
        said = refuse(engine, rank, sabotage)
        assert engine.partition == run.first, name
        change = f"changing the partition from {run.first} to {TARGETS[run.first]}"
        assert said.startswith(f"{change} failed and was undone on every rank"), said
        assert text in said, said
        after = digest(engine), engine.param_names.copy(), [id(m) for m in engine.local_layers().values()]
        assert before == after, name
        texts[name] = said
        losses.append(float(engine.train_batch(batches)))
    for target in (TARGETS[run.first], LATERS[run.first]):
        engine.repartition(target)
        assert engine.partition == target
        losses.append(float(engine.train_batch(batches)))
    return {"losses": losses, "digest": digest(engine), "texts": texts}


def train_static(_rank: int, run: Run) -> dict[str, Any]:
    engine = make_engine(run)
    batches = data(engine.grid.get_data_parallel_id(), run.micro_batches)
    return {
        "losses": [float(engine.train_batch(batches)) for _ in range(run.num_batches)],
        "digest": digest(engine),
    }


def with_and_without_failures(rank: int, run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    failing = train_through_failures(rank, run)
    return failing, train_static(rank, replace(run, num_batches=len(failing["losses"])))


@pytest.mark.parametrize(
    ("optimizer", "num_stages"),
    mostly(product(OPTIMIZERS, (3, 2)), [("zero1", 3)]),
)
def test_a_failure_on_one_rank_changes_nothing_on_any(optimizer: str, num_stages: int) -> None:
    """On three stages, and on two with two replicas each, one of which fails alone."""
    first = FIRST if num_stages == 3 else (0, 5, 8)
    run = Run(num_stages=num_stages, first=first, config={**OPTIMIZERS[optimizer], **CLIP, **WARMUP})
    results = run_ranks(with_and_without_failures, 3 if num_stages == 3 else 4, run)
    failing, static = zip(*results, strict=True)
    assert all(r["texts"] == failing[0]["texts"] for r in failing), "every rank raises the same text"
    assert failing[0]["losses"] == static[0]["losses"]
    merged = [{k: v for r in runs for k, v in r["digest"].items()} for runs in (failing, static)]
    assert len(merged[0]) == 8 and merged[0] == merged[1]


def train_through_a_failed_read(rank: int, run: Run) -> tuple[list[float], dict[str, str], list[bool], str]:
    """A rank can't read what another one offers; from then on layers travel in messages."""
    engine = make_engine(run)
    batches, others = data(0, run.micro_batches), [other for other in range(3) if other != rank]
    losses = [float(engine.train_batch(batches))]
    engine.repartition(LATER)
    reads = [any(cross_memory().is_read_by(other) for other in others)]
    losses.append(float(engine.train_batch(batches)))
    before = digest(engine)
    fails = patch.object(CrossMemory, "read", side_effect=OSError(14, "Bad address"))
    with fails, pytest.raises(MigrationError) as caught:
        engine.repartition(TARGET)
    assert engine.partition == LATER and digest(engine) == before
    reads.append(any(cross_memory().is_read_by(other) for other in others))
    losses.append(float(engine.train_batch(batches)))
    for target in (TARGET, FIRST):
        engine.repartition(target)
        assert engine.partition == target
        losses.append(float(engine.train_batch(batches)))
    return losses, digest(engine), reads, str(caught.value)


@pytest.mark.parametrize("optimizer", mostly(OPTIMIZERS, ["zero1"]))
def test_after_a_read_that_failed_layers_travel_in_messages(optimizer: str) -> None:
    run = Run(num_stages=3, first=FIRST, config={**OPTIMIZERS[optimizer], **CLIP, **CROSS_MEMORY})
    results = run_ranks(train_through_a_failed_read, 3, run)
    static = run_ranks(train_static, 3, replace(run, num_batches=len(results[0][0])))
    assert [losses for losses, *_ in results] == [rank["losses"] for rank in static]
    assert [digest for _, digest, *_ in results] == [rank["digest"] for rank in static]
    assert all(reads == [True, False] for *_, reads, _ in results)
    [text] = {text for *_, text in results}
    assert text.endswith("(rank 1: OSError: [Errno 14] Bad address; rank 2: OSError: [Errno 14] Bad address)")


def die_while_reading(rank: int, lost: int) -> str:
    """The second rank reads from the first one; one of the two is lost meanwhile."""
    engine = make_engine(Run(num_stages=3, first=FIRST, config=CROSS_MEMORY))
    engine.train_batch(data(0, 4))
    read = CrossMemory.read

    def kill(memory: CrossMemory, source: int, pieces: Sequence[Piece]) -> None:
        os.kill(os.getpid() if lost == rank else memory._processes[source], signal.SIGKILL)
        read(memory, source, pieces)

    with patch.object(CrossMemory, "read", kill), pytest.raises(RankLostError) as caught:
        engine.repartition((0, 2, 6, 8))
    return str(caught.value)


@pytest.mark.parametrize("lost", [0, 1])
def test_who_is_lost_while_layers_are_read_is_named(lost: int) -> None:
    texts = run_ranks(die_while_reading, 3, lost, may_die=[lost])
    assert texts.pop(lost) is None
    assert all(text.startswith(f"rank {lost} ended while layers were moved, so every rank stops") for text in texts)


# -- boundaries that break a rule -------------------------------------------------------------

BAD = {
    "count": ([0, 4, 8], r"\(0, 4, 8\) have 3 entries; 3 stages need 4"),
    "not increasing": ([0, 5, 4, 8], r"\(0, 5, 4, 8\) fall from 5 to 4 at stage 1; they must increase"),
    "empty": ([0, 4, 4, 8], r"\(0, 4, 4, 8\) leave stage 1 empty"),
    "end": ([0, 3, 6, 7], r"\(0, 3, 6, 7\) run from 0 to 7; they must start at 0 and end at .* 8"),
    "start": ([1, 3, 6, 8], r"\(1, 3, 6, 8\) run from 1 to 8"),
}


def bad_boundaries(rank: int) -> None:
    engine = make_engine(Run(num_stages=3, first=FIRST))
    batches = data(0, 4)
    with pytest.raises(RuntimeError, match="no profile to rebalance from; train one batch first"):
        engine.rebalance()
    engine.train_batch(batches)
    for boundaries, message in BAD.values():
        with pytest.raises(ValueError, match=message):
            engine.repartition(boundaries)
    with pytest.raises(ValueError, match=r"disagree on the boundaries.*rank 2 has \[0, 2, 7, 8\]"):
        engine.repartition([0, rank, 7, 8] if rank else [0, 1, 7, 8])
    with pytest.raises(ValueError, match="disagree on the boundaries"):
        engine.repartition([0, 1, 7, 8] if rank else [0, 1, 8])
    assert engine.partition == FIRST and engine.repartition(FIRST) is None
    engine.train_batch(batches)
    event = engine.repartition([0, 1, 7, 8])
    assert event.before == FIRST and event.after == engine.partition == (0, 1, 7, 8)
    engine.train_batch(batches)


def test_bad_boundaries_are_refused_on_every_rank() -> None:
    run_ranks(bad_boundaries, 3)


class Choice:
    """A ``partition_method`` callable that does what it is told to."""

    def __init__(self) -> None:
        self.answer: Callable[[], Any] = lambda: list(FIRST)
        self.__name__ = "my_choice"

    def __call__(self, profile: Any, num_stages: int) -> Any:
        assert num_stages == 3 and len(profile.layers) == 8
        return self.answer()


def callable_method(rank: int) -> None:
    choice = Choice()
    config = {"dynamic_pipeline": {"enabled": True, "rebalance_every": 1, "profile_batches": 1}}
    engine = make_engine(Run(num_stages=3, config=config), partition_method=choice)
    batches = data(0, 4)
    engine.train_batch(batches)
    assert engine.partition == FIRST

    def raise_here() -> Any:
        if rank == 1:
            raise KeyError("missing on rank one")
        return list(TARGET)

    choice.answer = raise_here
    expected = KeyError if rank == 1 else ValueError
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):  # then it pauses
            engine.train_batch(batches)
    told = [str(w.message) for w in caught if "dynamic_pipeline" in str(w.message)]
    assert len(told) == (1 if rank == 0 else 0)
    assert all("failed, training goes on with [0, 3, 6, 8]" in text for text in told)
    assert all("rank 1: KeyError: 'missing on rank one'" in text for text in told)
    with pytest.raises(expected, match="missing on rank one"):
        engine.rebalance()
    choice.answer = lambda: [0, rank + 1, 7, 8]
    with pytest.raises(ValueError, match="disagree on the boundaries chosen by my_choice.*rank 2 has"):
        engine.rebalance()
    for boundaries, message in BAD.values():
        choice.answer = lambda boundaries=boundaries: boundaries  # type: ignore[misc]
        with pytest.raises(ValueError, match=message):
            engine.rebalance()
    assert engine.partition == FIRST
    choice.answer = lambda: list(TARGET)
    engine.rebalance()
    assert engine.partition == TARGET
    engine.train_batch(batches)


def test_a_callable_that_misbehaves_raises_or_warns_and_moves_nothing() -> None:
    run_ranks(callable_method, 3)
