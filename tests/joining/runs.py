"""A training that is resized on the way, as ranks and newcomers run it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import psutil

from dynpipe_ds.joining.address import DOOR_FILE, JOIN
from dynpipe_ds.ranks import place
from tests.distributed.configs import BY_HAND
from tests.distributed.models import Run, data, digest, make_engine
from tests.distributed.ranks import DOOR, run_ranks

WAIT_S = 60.0

Steps = Mapping[int, int]
"""Batch -> number of stages from its end on."""


class Outcome(NamedTuple):
    """What a rank knows at the end; ``held``: number of stages, and what the process held, after every resize."""

    losses: dict[int, float]
    digest: dict[str, str]
    partition: tuple[int, ...]
    events: list[Any]
    held: list[tuple[int, Counter[str]]]


def elastic(run: Run, **section: Any) -> Run:
    """The same run, which workers may join."""
    config = dict(run.config)
    section = {**BY_HAND, **config.pop("dynamic_pipeline", {}), **section}
    section["elastic"] = {"enabled": True, "door_file": os.environ[DOOR]}
    return replace(run, config={**config, "dynamic_pipeline": section})


def wait_for_newcomers(engine: Any, number: int) -> None:
    """Let nobody go on before so many wait; collective."""
    until = time.monotonic() + WAIT_S
    while engine.num_waiting() < number:
        assert time.monotonic() < until, f"{number} newcomers did not come in {WAIT_S:g} s"
        time.sleep(0.02)


def resized_by_environment(rank: int, run: Run, steps: Steps) -> Outcome:
    """The same where the section has no door, but the environment of the first ranks, as ``dynpipe run`` sets it."""
    if JOIN not in os.environ:
        os.environ[DOOR_FILE] = os.environ[DOOR]
    return resized(rank, run, steps, has_section=False)


def resized(_rank: int, run: Run, steps: Steps, *, has_section: bool = True) -> Outcome:
    """Train, with another number of stages after some batches; the same function is what a newcomer runs."""
    engine = make_engine(elastic(run) if has_section else run)
    batches, losses, events = data(engine.grid.get_data_parallel_id(), run.micro_batches), {}, []
    held: list[tuple[int, Counter[str]]] = []
    for _ in range(engine.global_steps * run.micro_batches):
        next(batches)
    while engine.global_steps < run.num_batches:
        batch = engine.global_steps
        losses[batch] = float(engine.train_batch(batches))
        wanted = steps.get(batch, engine.num_stages)
        if wanted > engine.num_stages:
            replicas = engine.grid.get_data_parallel_world_size()
            wait_for_newcomers(engine, (wanted - engine.num_stages) * replicas)
        if wanted != engine.num_stages:
            events.append(engine.repack(wanted))
            held.append((engine.num_stages, what_is_held(engine)))
    outcome = Outcome(losses, digest(engine), engine.partition, events, held)
    engine.destroy()  # who still waits hears that it is over
    return outcome


def what_is_held(engine: Any) -> Counter[str]:
    """Descriptors by kind, threads of Python's, all threads, and KiB of memory of this process.

    Who waits, knocks or ends has a connection to this process's door or to the place that it holds, and who is being
    examined a thread. They come and go with other processes, so they are counted apart (``guests``), and all are
    counted until two counts in a row agree.
    """
    gc.collect()
    ports = {engine.dynamic.repacker.growing._doorway.door.address.port}
    ports |= {place._own[1].port} if place._own and place._own[0] == os.getpid() else set()
    before, found = Counter[str](), count_once(ports)
    while before != found:
        time.sleep(0.005)
        before, found = found, count_once(ports)
    found["KiB"] = psutil.Process().memory_info().rss >> 10
    return found


def count_once(ports: Collection[int]) -> Counter[str]:
    """Descriptors and threads of this process, those of guests at some ports apart."""
    connections = psutil.Process().net_connections("inet")
    guests = {c.fd for c in connections if c.laddr.port in ports and c.status != psutil.CONN_LISTEN}
    examining = sum(thread.name == "dynpipe_ds newcomer" for thread in threading.enumerate())
    found = Counter({
        "guests": len(guests) + examining, "Python threads": threading.active_count() - examining,
        "threads": len(os.listdir("/proc/self/task")) - examining,
    })  # fmt: skip
    for number in {int(name) for name in os.listdir("/proc/self/fd")} - guests:
        with suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{number}").partition(":")[0]] += 1
    return found


def assert_same_bits(
    run: Run, ranks: int, steps: Steps, newcomers: int, *, come_again: bool = False,
    function: Callable[[int, Run, Steps], Outcome] = resized,
) -> list[Outcome]:
    """Compare a run that is resized with one that is not; what those returned who were there at the end."""
    everyone = run_ranks(resized, ranks, run, {})
    numbers = [run.num_stages, *steps.values()]
    may_leave = range(1, ranks + newcomers) if any(b < a for a, b in pairwise(numbers)) else ()
    changed = run_ranks(
        function, ranks, run, steps, newcomers=newcomers, may_leave=may_leave, come_again=come_again
    )
    last: list[Outcome] = [outcome for outcome in changed if outcome is not None]
    losses = everyone[0].losses
    for outcome in last:
        assert outcome.losses == {batch: losses[batch] for batch in outcome.losses}
        assert max(outcome.losses, default=run.num_batches - 1) == run.num_batches - 1
    digests = [{item for outcome in outcomes for item in outcome.digest.items()} for outcomes in (everyone, last)]
    assert digests[0] == digests[1]
    return last


