"""The results of a job whose figures were computed by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

from dynpipe_ds import LayerProfile, PipelineProfile, RebalanceEvent, StageProfile
from dynpipe_ds.journal.write import JournalWriter
from dynpipe_ds.planning import assume_halves, plan_order
from dynpipe_ds.schedule import order_of
from dynpipe_ds.simulation import Workload, simulate
from scenarios.recording import Recording
from scenarios.report.comparison import RunSummary

NUM_BATCHES, FROZEN_AT, MOVED_AT = 24, 8, 12


def job_profile(batch: int, boundaries: tuple[int, ...]) -> PipelineProfile:
    """Layers of 1 ms and 2 ms; the first four have no backward from the batch where they are frozen."""
    frozen = 4 if batch >= FROZEN_AT else 0
    layers = [LayerProfile(f"Layer{i}", 0.001, 0.0 if i < frozen else 0.002, 1, 4, 4, 8, 16) for i in range(8)]
    return PipelineProfile(batch, boundaries, 4, tuple(layers), ())


def _slower(profile: PipelineProfile, computing_s: float) -> PipelineProfile:
    """A batch that took so long, on both stages."""
    stages = [StageProfile(0.75 * computing_s, 0.25 * computing_s, 0.0, 0.1, computing_s + 0.1, 0)] * 2
    return dataclasses.replace(profile, stages=tuple(stages))


def _write_journal(folder: Path, told: list[PipelineProfile], losses: tuple[float, ...]) -> None:
    """Write the journal of a run as its engine does."""
    (folder / "journal.jsonl").unlink(missing_ok=True)
    names = [layer.name for layer in told[0].layers]
    about = {"layers": names, "samples_a_batch": 2, "num_ranks": 2, "device": "cpu", "settings": {}}
    writer = JournalWriter(str(folder), lambda: about)
    with patch("torch.distributed.get_rank", return_value=0):
        for profile, loss in zip(told, losses, strict=True):
            writer.profile(profile, profile, order="1F1B", speeds=None, pinned=())
            writer.batch(profile.batch, loss, 0.1)
    writer.close()


def write_job(folder: str, *, recorded: bool = True, moves: bool = True) -> dict[str, Any]:
    """Write results as the training entry does; the machine takes twice as long from the move on.

    Args:
        folder: where.
        recorded: as it is done now; else as before layer times, windows and partitions were recorded.
        moves: whether the dynamic run moves a layer; if not, it is faster all the same, by luck.
    """
    runs = []
    for label in ("static", "dynamic"):
        recording = Recording()
        stages_s, batches_s, told = [], [], list[PipelineProfile]()
        for batch in range(NUM_BATCHES):
            moved = label == "dynamic" and batch >= MOVED_AT and moves
            profile = job_profile(batch, (0, 5, 8) if moved else (0, 4, 8))
            halves = Workload.from_profile(assume_halves(profile, 0.5))
            order = plan_order(halves).order if moved else order_of("1f1b", 4, 2)
            outcome = simulate(halves, order, timeline=True)
            recording.add_order(batch, profile.boundaries, order)
            recording.add_prediction(_slower(profile, 1.5 * outcome.makespan_s), order)
            timeline = [list(interval) for interval in outcome.timeline]
            slowness = 2.0 if batch >= MOVED_AT else 1.0
            busy_s = [4 * slowness * s for s in profile.stage_seconds()]
            stages_s.append(busy_s)
            stages = tuple(StageProfile(one_s, 0.0, max(busy_s) - one_s, 0.001, max(busy_s), 0) for one_s in busy_s)
            told.append(dataclasses.replace(profile, stages=stages))
            batches_s.append((max(busy_s) + 0.001) * (0.65 if label == "dynamic" and not moves else 1.0))
        moved_at = [MOVED_AT - 1] if label == "dynamic" and moves else []
        if moved_at:
            event = RebalanceEvent(MOVED_AT, (0, 4, 8), (0, 5, 8), 0.25, 2**20, 0.001, 0.002)
            recording.add_rebalance(event)
        summary = RunSummary(
            label=label, tokens=NUM_BATCHES * 64, seconds=sum(batches_s), losses=tuple(3.0 - i / 10 for i in range(24)),
            boundaries=(0, 5, 8) if moved_at else (0, 4, 8), bubble_ratio=0.3, num_rebalances=len(moved_at),
            orders=((0, "1F1B"), *([(MOVED_AT, "planned")] if moved_at else [])),
        )
        values = dataclasses.asdict(summary) | {"timeline": timeline}
        if recorded:
            _write_journal(Path(folder) / "journal" / label, told, summary.losses)
            values["windows"] = [[first, 6, sum(batches_s[first : first + 6])] for first in range(0, NUM_BATCHES, 6)]
            values["partitions"] = [[0, [0, 4, 8]], *([[MOVED_AT, [0, 5, 8]]] if moved_at else [])]
        else:
            for name in ("windows", "partitions", "orders", "timeline"):
                del values[name]
        values |= {
            "tokens_per_s": summary.tokens_per_s, "batches_s": batches_s, "stages_s": stages_s,
            "rebalanced_at": moved_at,
        }  # fmt: skip
        runs.append(values | ({"recording": dataclasses.asdict(recording)} if recorded else {}))
    settings = {
        "scenario": "freezing", "model": {"seq_len": 32},
        "deepspeed": {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
    }  # fmt: skip
    results = {"settings": settings, "environment": {"ranks": 2}, "runs": runs}
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return results
