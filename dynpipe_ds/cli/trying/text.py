"""What was found, for people and as values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from dynpipe_ds.cli.show import brackets, layer_spans, milliseconds
from dynpipe_ds.cli.trying.outcome import Outcome, number
from dynpipe_ds.cli.trying.settings import DEEPSPEED, MOVING, STILL
from dynpipe_ds.cli.trying.trial import Trial
from dynpipe_ds.reporting import format_table


def text_of(trial: Trial) -> str:
    """The table, and below it what it does not say."""
    head = ["way", "batches", "losses", "weights", "ms a batch", "moves"]
    table = format_table([head, *(_row(trial, way) for way in trial.outcomes)])
    return "\n".join([table, *(line for part in _below(trial) for line in part)])


def values_of(trial: Trial) -> dict[str, Any]:
    """The same as values."""
    ways = {way: _values(trial, way) for way in trial.outcomes}
    reasons = [asdict(reason) for reason in trial.reasons]
    return {"good": trial.good, "complete": trial.complete, "ways": ways, "reasons": reasons, "cost": _cost(trial)}


def _values(trial: Trial, way: str) -> dict[str, Any]:
    outcome, difference = trial.outcomes[way], trial.differences.get(way)
    return {
        "batches": outcome.num_batches, "failure": outcome.failure, "errors": outcome.errors,
        "stacks": outcome.stacks, "ranks": len(outcome.ranks), "median_s": outcome.median_s(),
        "losses": [_shown_number(loss) for rank in outcome.ranks[:1] for loss in rank.losses()],
        "equal": None if difference is None else difference.equal,
        "same_as_still": way == MOVING and trial.moved is not None and trial.moved.equal,
        "differs": "" if difference is None else str(difference),
        "weights_compared": len(outcome.held("weights")), "state_compared": difference and difference.compared_state,
        "moves": [{"before": m["before"], "after": m["after"], "seconds": m["seconds"]} for m in outcome.told("move")],
        "refused": [{"boundaries": r["boundaries"], "text": r["text"]} for r in outcome.told("refused")],
        "ours": bool(outcome.facts.get("ours")),
        "warnings": _warnings(outcome), "facts": outcome.facts,
    }  # fmt: skip


def _shown_number(loss: list[str]) -> float | str | None:
    """The first number of what ``train_batch`` returned, as JSON can hold it."""
    value = next((found for found in map(number, loss) if found is not None), None)
    return value if value is None or math.isfinite(value) else str(value)


def _row(trial: Trial, way: str) -> list[str]:
    outcome, difference = trial.outcomes[way], trial.differences.get(way)
    median_s = outcome.median_s()
    moves = str(len(outcome.told("move"))) if way == MOVING else "-"
    if difference is None:
        losses = weights = "failed" if outcome.failure else "-"
    else:
        losses = "DIFFER" if difference.losses or difference.evaluations else "equal"
        weights = "DIFFER" if difference.weights or difference.state else "equal" if outcome.held("weights") else "-"
    return [way, str(outcome.num_batches), losses, weights, "-" if median_s is None else milliseconds(median_s), moves]


def _below(trial: Trial) -> Iterator[list[str]]:
    for way, outcome in trial.outcomes.items():
        if outcome.failure:
            yield ["", f"FAILED   {way}: {outcome.failure}"]
            yield [f"    also: {error}" for error in outcome.errors[1:]]
            yield [f"    rank {rank} was at {stack}" for rank, stack in outcome.stacks.items()]
    yield from _differences(trial)
    for reason in trial.reasons:
        yield ["", f"{'because' if reason.shown else 'maybe'}  {reason.text}", f"    -> {reason.remedy}"]
    yield from _moves(trial)
    warnings = dict.fromkeys(text for outcome in trial.outcomes.values() for text in _warnings(outcome))
    if warnings:
        yield ["", *(f"warning  {text}" for text in warnings)]
    if (cost := _cost(trial)) is not None:
        yield ["", *_remarks(trial), _cost_line(cost), "", _verdict(trial)]


def _differences(trial: Trial) -> Iterator[list[str]]:
    still, moved = trial.differences.get(STILL), trial.moved
    if still is not None and not still.equal:
        yield ["", f"DIFFERS  {STILL} from {DEEPSPEED}: {still}"]
        if moved is not None and moved.equal:
            yield [f"         {MOVING} has the same bits as {STILL}"]
    if moved is not None and not moved.equal:
        yield ["", f"DIFFERS  {MOVING} from {STILL}: {moved}"]
        earlier = [m for m in trial.outcomes[MOVING].told("move") if m["batch"] < moved.batch]
        yield [f"    after the move {brackets(m['before'])} -> {brackets(m['after'])}" for m in earlier[-1:]]


def _moves(trial: Trial) -> Iterator[list[str]]:
    outcome = trial.outcomes.get(MOVING)
    if outcome is None or outcome.failure:
        return
    moves, facts = outcome.told("move"), outcome.facts
    if moves:
        yield ["", f"moves    {' -> '.join(brackets(b) for b in [facts['boundaries'], *(m['after'] for m in moves)])}"]
        never = {*range(int(facts["layers"]))} - {*moves[-1]["layers"]}
        yield [f"         {layer_spans(never)} never moved"] if never else []
    else:
        why = "there is one stage" if facts["stages"] == 1 else "no other boundaries are allowed, or too few batches"
        yield ["", f"moves    none: {why}"]
    refused = {str(r["text"]): r["boundaries"] for r in outcome.told("refused")}
    yield [f"refused  {brackets(boundaries)}: {text}" for text, boundaries in refused.items()]


def _warnings(outcome: Outcome) -> list[str]:
    return list(dict.fromkeys(str(w["text"]) for rank in outcome.ranks for w in rank.events["warning"]))


def _remarks(trial: Trial) -> list[str]:
    remarks = []
    if trial.outcomes[DEEPSPEED].told("not_saved"):
        remarks.append("remark   save_checkpoint was left out in all ways")
    if not all(difference.compared_state for difference in trial.differences.values()):
        remarks.append("remark   optimizer state was not compared by itself: it is kept in flat buffers")
    unread = [r.end["unread"] for outcome in trial.outcomes.values() for r in outcome.ranks if "unread" in r.end]
    return remarks + [f"remark   weights could not be read: {text}" for text in dict.fromkeys(unread)]


def _cost(trial: Trial) -> dict[str, float] | None:
    if not trial.complete:
        return None
    first, still = trial.outcomes[DEEPSPEED], trial.outcomes[STILL]
    profiling = [rank.end.get("profiling_s", 0.0) / max(1, still.num_batches) for rank in still.ranks]
    seconds = first.seconds()
    found = {"accounted_s": max(profiling)}
    if not seconds or not still.seconds():
        return found
    centre = median(seconds)
    spread = median(abs(s - centre) for s in seconds)
    return {**found, "batch_s": centre, "difference_s": median(still.seconds()) - centre, "spread_s": spread}


def _cost_line(cost: Mapping[str, float]) -> str:
    line = f"cost     of the section: {milliseconds(cost['accounted_s'])} ms a batch by its own accounting"
    if "batch_s" not in cost:
        return line
    return (
        f"{line} ({cost['accounted_s'] / cost['batch_s']:.1%}), {cost['difference_s'] * 1e3:+.2f} ms by medians "
        f"of batches, which spread by {milliseconds(cost['spread_s'])} ms; moves not included"
    )


def _verdict(trial: Trial) -> str:
    if trial.equal:
        return "all bits are equal" if trial.good else "all bits are equal, but a layer can't move"
    if trial.good:
        return "bits differ for the reason above and no other"
    return "bits differ, and why is not shown"
