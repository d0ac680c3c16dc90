"""A finished job's ``results.json`` as typed values, and what follows from it.

The file is what the training entry of the scenarios writes: two runs of one job, whose layer times are in their
journals beside it. Older folders lack what is recorded now; what follows from it is then ``None`` or empty.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from math import fsum
from pathlib import Path
from statistics import median, stdev
from typing import Any

from dynpipe_ds.journal import Journal, read_journal
from dynpipe_ds.simulation import Interval
from scenarios.recording import Recording
from scenarios.report.comparison import RunSummary

WINDOW = 10
"""Most batches before, and after, a re-partition that its realised gain is measured from."""

_MEDIAN_ERROR = 1.2533  # standard error of a median over that of a mean, for normal noise


@dataclass(frozen=True)
class Rebalance:
    """One change of partition, with what was promised and what came of it; ``None`` where it is not known.

    Attributes:
        batch: batches trained before it.
        before: boundaries it replaced.
        after: boundaries since then.
        predicted_gain: share by which the slowest stage was to shrink.
        realised_gain: share by which the slowest stage's measured seconds did shrink against those of the static
            run in the same batches, medians of up to :data:`WINDOW` batches on either side. Both runs do the same
            work in turns, so neither the model's own change nor a machine that slows down counts.
        realised_noise: standard error of that.
        same_work_gain: how much shorter the slowest stage was than it would have been with the boundaries of
            before, by the layer times of the batches after: the move alone.
        batch_stayed_s: what a batch after it would have taken without it: the static run's batches, times how the
            two runs compared before.
        batch_moved_s: what a batch after it took, median.
        bytes_moved: bytes of the moved layers.
        cost_s: seconds of deciding and moving.
    """

    batch: int
    before: tuple[int, ...] | None
    after: tuple[int, ...] | None
    predicted_gain: float | None
    realised_gain: float | None
    realised_noise: float | None
    same_work_gain: float | None
    batch_stayed_s: float | None
    batch_moved_s: float | None
    bytes_moved: int | None
    cost_s: float | None


@dataclass(frozen=True)
class RunResults:
    """One run of the job.

    Attributes:
        summary: what the table shows.
        batches_s: seconds of every batch.
        stages_s: busy seconds of every stage, for every profiled batch.
        rebalanced_at: indices of the batches after which the partition changed.
        recording: re-partitions and orders; ``None`` in older files.
        journal: layer times over training; ``None`` where there is none of this run.
        rebalances: every change of partition.
        timeline: the newest profiled batch; none in older files.
        whole_backwards: why stages ran backwards whole that an order split, by stage.
    """

    summary: RunSummary
    batches_s: tuple[float, ...]
    stages_s: tuple[tuple[float, ...], ...]
    rebalanced_at: tuple[int, ...]
    recording: Recording | None
    journal: Journal | None
    rebalances: tuple[Rebalance, ...]
    timeline: tuple[Interval, ...] = ()
    whole_backwards: Mapping[int, tuple[str, ...]] = field(default_factory=dict)

    def stages_in(self, batches: range) -> dict[int, Sequence[float]]:
        """Busy seconds of every stage, in those of some batches where they are known.

        Args:
            batches: consecutive batches.
        """
        if self.journal is not None:
            return {
                profile.batch: [stage.busy_s for stage in profile.stages]
                for profile in self.journal.profiles if profile.batch in batches
            }  # fmt: skip
        if len(self.stages_s) != len(self.batches_s):
            return {}  # some batches were not profiled, so rows can't be told apart
        return {batch: self.stages_s[batch] for batch in batches}

    def stages_of(self, batches: range) -> list[float] | None:
        """Busy seconds of every stage, medians over some batches; ``None`` if that is not known.

        Args:
            batches: consecutive batches, on one partition.
        """
        rows = list(self.stages_in(batches).values())
        if len(set(map(len, rows))) != 1:
            return None  # continued with another number of stages in between
        return [median(times) for times in zip(*rows, strict=True)]


@dataclass(frozen=True)
class JobResults:
    """The whole file.

    Attributes:
        static: the run that kept its partition.
        dynamic: the run that was re-partitioned.
        tokens_a_batch: of one batch; ``None`` if the settings do not say.
        settings: the job's settings.
        environment: versions and device.
        busy: why the machine was busy while they trained; empty if it was idle, or if older results do not say.
    """

    static: RunResults
    dynamic: RunResults
    tokens_a_batch: int | None
    settings: Mapping[str, Any]
    environment: Mapping[str, Any]
    busy: tuple[str, ...] = ()

    @property
    def has_recording(self) -> bool:
        """Whether layer times and events were recorded."""
        return all(run.recording is not None and run.journal is not None for run in (self.static, self.dynamic))


def load_results(folder: str | Path) -> JobResults:
    """Read the results in an output folder.

    Args:
        folder: the training entry's ``output_dir``, or the path of its ``results.json``.

    Raises:
        ValueError: when they are missing or are not of two runs, with the remedy.
    """
    file = Path(folder)
    file = file / "results.json" if file.is_dir() else file
    remedy = "give the output folder of 'python -m scenarios.train', when it has ended"
    if not file.is_file():
        raise ValueError(f"{file}: no such file; {remedy}")
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        runs = {run["label"]: run for run in values["runs"]}
        # The first batches of a run are slower: memory is allocated, threads begin.
        warmup = (values.get("settings", {}).get("run") or {}).get("warmup_batches", 0)
        journals = _journals(file.parent, values.get("settings", {}))
        static = _run(runs["static"], None, warmup, journals)
        dynamic = _run(runs["dynamic"], static, warmup, journals)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        what = f"has no {error}" if isinstance(error, KeyError) else f"can't be read: {error}"
        raise ValueError(f"{file}: {what}; {remedy}") from error
    settings, environment = values.get("settings", {}), values.get("environment", {})
    tokens = _tokens_a_batch(settings, environment, len(static.summary.boundaries) - 1)
    busy = tuple((values.get("machine") or {}).get("reasons", ()))
    return JobResults(static, dynamic, tokens, settings, environment, busy)


def _journals(folder: Path, settings: Mapping[str, Any]) -> Path:
    """Where the journals of both runs are."""
    section = (settings.get("deepspeed") or {}).get("dynamic_pipeline") or {}
    return Path(section.get("journal") or folder / "journal")


def _journal(file: Path, losses: Sequence[float]) -> Journal | None:
    """The journal of a run, if it tells of this one: a later run may have begun in the same folder."""
    try:
        found = read_journal(file)
    except ValueError:
        return None
    return found if found.profiles and [batch.loss for batch in found.batches] == list(losses) else None


def _run(values: Mapping[str, Any], reference: RunResults | None, warmup: int, journals: Path) -> RunResults:
    known = {field.name for field in fields(RunSummary)}
    summary: dict[str, Any] = {key: _as_tuples(value) for key, value in values.items() if key in known}
    recording = Recording.from_values(values["recording"]) if values.get("recording") else None
    batches_s = tuple(values["batches_s"])
    run = RunResults(
        RunSummary(**summary), batches_s, tuple(map(tuple, values["stages_s"])), tuple(values["rebalanced_at"]),
        recording, _journal(journals / values["label"], values["losses"]), (),
    )
    events = recording.rebalances if recording is not None else [{"batch": at + 1} for at in run.rebalanced_at]
    ends = [warmup, *(event["batch"] for event in events), len(batches_s)]
    windows = zip(events, ends, ends[2:], strict=False)
    rebalances = tuple(_rebalance(run, reference, *window) for window in windows)
    timeline = tuple(Interval(*row) for row in values.get("timeline", ()))
    whole = {stage: tuple(reasons) for stage, *reasons in values.get("whole_backwards", ())}
    return replace(run, rebalances=rebalances, timeline=timeline, whole_backwards=whole)


def _rebalance(
    run: RunResults, reference: RunResults | None, event: Mapping[str, Any], previous: int, following: int
) -> Rebalance:
    at = event["batch"]
    before, after = range(max(previous, at - WINDOW), at), range(at, min(following, at + WINDOW))
    old, new = (tuple(event[key]) if key in event else None for key in ("before", "after"))
    realised, noise = _realised_gain(run, reference, before, after)
    return Rebalance(
        batch=at, before=old, after=new,
        predicted_gain=event.get("predicted_gain"),
        realised_gain=realised, realised_noise=noise,
        same_work_gain=_same_work_gain(run.journal, old, new, after),
        batch_stayed_s=_batch_stayed_s(run, reference, before, after),
        batch_moved_s=_median(run.batches_s[after.start : after.stop]),
        bytes_moved=event.get("bytes_moved"),
        cost_s=event["plan_s"] + event["migrate_s"] if "plan_s" in event else None,
    )  # fmt: skip


def _realised_gain(
    run: RunResults, reference: RunResults | None, before: range, after: range
) -> tuple[float | None, float | None]:
    """How the slowest stage changed from the one to the other batches relative to the reference's, and the noise."""
    sides = []
    for batches in (before, after):
        own, others = (each.stages_in(batches) if each else {} for each in (run, reference))
        pairs = [(max(own[batch]), max(others[batch])) for batch in own if batch in others]
        ratios = [slowest_s / other_s for slowest_s, other_s in pairs if other_s]
        if not ratios:
            return None, None
        sides.append(ratios)
    old, new = map(median, sides)
    if not old:
        return None, None
    if min(map(len, sides)) < 2:
        return 1.0 - new / old, None
    errors = [_MEDIAN_ERROR * stdev(side) / math.sqrt(len(side)) for side in sides]
    return 1.0 - new / old, math.hypot(errors[0] * new / old, errors[1]) / old


def _batch_stayed_s(run: RunResults, reference: RunResults | None, before: range, after: range) -> float | None:
    """The reference's batches after the move, times how the two runs compared before it."""
    if reference is None:
        return None
    # The last batch before the move lasted until the layers had moved.
    earlier = slice(before.start, before.stop - 1)
    compared = [a / b for a, b in zip(run.batches_s[earlier], reference.batches_s[earlier], strict=True) if b]
    expected_s = _median(reference.batches_s[after.start : after.stop])
    return expected_s * median(compared) if compared and expected_s is not None else None


def _same_work_gain(
    journal: Journal | None, before: tuple[int, ...] | None, after: tuple[int, ...] | None, batches: range
) -> float | None:
    if journal is None or before is None or after is None:
        return None
    rows = [profile.layer_s for profile in journal.profiles if profile.batch in batches]
    slowest = [[max(fsum(row[a:b]) for a, b in pairwise(parts)) for parts in (before, after)] for row in rows]
    return median([1.0 - new / old if old else 0.0 for old, new in slowest]) if rows else None


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _tokens_a_batch(settings: Mapping[str, Any], environment: Mapping[str, Any], num_stages: int) -> int | None:
    try:
        config = settings["deepspeed"]
        samples = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
        return int(samples * settings["model"]["seq_len"] * (environment["ranks"] // num_stages))
    except (KeyError, TypeError):
        return None
