"""The verdict on one mode: every course against the undivided model, and all courses against each other."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dynpipe_ds.cli.numerics.model import NUM_BATCHES, NUM_LAYERS, Course, Mode
from dynpipe_ds.cli.numerics.record import KINDS, WEIGHT, WHOLE, Quantity, Record
from dynpipe_ds.cli.show import layer_spans

_LEAST_SIZE = 1e-3  # of the largest tensor of its kind and batch: below, rounding is all there is to see
_MISSING = float("inf")


class Verdict(NamedTuple):
    """Problems, one line each, and the largest difference to the undivided model as a share of a quantity's size."""

    problems: list[str]
    largest: float


def merge(records: tuple[Record, Record]) -> tuple[Record, list[str]]:
    """What both ranks measured of one run, and what is wrong with it: each layer is on one rank after every batch."""
    first, second = records
    problems: list[str] = []
    for batch in range(NUM_BATCHES):
        held = Counter(layer for r in records for layer in {q.layer for q in r if q[:2] == (batch, WEIGHT)})
        counts = ((layer, held[layer]) for layer in range(NUM_LAYERS))
        wrong = [f"layer {layer} is on {n or 'no'} stage{'s' if n else ''}" for layer, n in counts if n != 1]
        if wrong:
            problems.append(f"after batch {batch + 1} {', '.join(wrong)}")
            break
    differing = [q for q in first.keys() & second.keys() if q.layer == WHOLE and not _same(first[q], second[q])]
    if differing:
        batch, kind, *_ = min(differing, key=lambda q: (q.batch, KINDS.index(q.kind)))
        problems.append(f"{_name(batch, kind)} after batch {batch + 1} differs between the two stages")
    return {**second, **first}, problems


def compare(mode: Mode, reference: Record, runs: Mapping[Course, Record]) -> Verdict:
    """Compare finished runs of one mode with the undivided model, and with each other."""
    problems: list[str] = []
    largest = 0.0
    agreeing: dict[Course, Record] = {}
    for course, record in runs.items():
        differences = _differences(reference, record)
        off = {q: d for q, d in differences.items() if not d <= mode.tolerance}
        largest = max([largest, *(d for d in differences.values() if d == d)])
        if off:
            share = f"as a share of the undivided model's (allowed {mode.tolerance:.0e})"
            problems.append(f"{_first_of(off, course)}, {share}")
        else:
            agreeing[course] = record
    # What is off by itself is told; comparing its bits, too, would say the same again.
    for course, record in list(agreeing.items())[1:]:
        first, wanted = next(iter(agreeing.items()))
        unequal = {q: 0.0 for q in wanted.keys() | record.keys() if not _same(wanted.get(q), record.get(q))}
        if unequal:
            problems.append(f"{_first_of(unequal, course)}: other bits than with cut {first}")
    return Verdict(problems, largest)


def _differences(reference: Record, record: Record) -> dict[Quantity, float]:
    """By how much a run is off; infinite where it lacks a quantity."""
    floors: dict[tuple[int, str], float] = defaultdict(float)
    for q, wanted in reference.items():
        floors[q.batch, q.kind] = max(floors[q.batch, q.kind], _LEAST_SIZE * float(wanted.abs().max()))
    return {q: _difference(wanted, record.get(q), floors[q.batch, q.kind]) for q, wanted in reference.items()}


def _difference(wanted: Tensor, found: Tensor | None, floor: float) -> float:
    if found is None or found.shape != wanted.shape:
        return _MISSING
    size = max(float(wanted.abs().max()), floor)
    difference = float((found - wanted).abs().max())
    return difference / size if size else difference


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and bool(torch.equal(a, b))


def _first_of(off: Mapping[Quantity, float], course: Course) -> str:
    """All that is off in the first batch where something is, in the order of cause and effect."""
    batch = min(q.batch for q in off)
    told = []
    for kind in KINDS:
        amounts = {q: amount for q, amount in off.items() if (q.batch, q.kind) == (batch, kind)}
        if amounts:
            amount = max(amounts.values())
            by = "" if not amount else " missing" if amount == _MISSING else f" off by {amount:.1e}"
            layers = {q.layer for q in amounts} - {WHOLE}
            told.append(f"{_name(batch, kind)}{f' of {layer_spans(layers)}' if layers else ''}{by}")
    when = "in the evaluation" if batch == NUM_BATCHES else f"batch {batch + 1}"
    return f"{course.at(batch)}, {when}: {', '.join(told)}"


def _name(batch: int, kind: str) -> str:
    return "loss of the evaluation" if batch == NUM_BATCHES else kind
