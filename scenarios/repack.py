"""Train one job on all ranks, then again re-packed onto fewer while the model shrinks, and compare.

    python -m scenarios.repack experiment=repack_pruning

The runs follow each other, since ranks that are released do not come back.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tqdm import tqdm

from dynpipe_ds import RepackEvent
from dynpipe_ds.reporting import format_table
from scenarios.compare import Contender, build_contender
from scenarios.data import Tokens, load_data
from scenarios.entry import start
from scenarios.opening import clear
from scenarios.report.comparison import same_bits
from scenarios.report.pictures import save_workers
from scenarios.settings import Settings
from scenarios.train import choose_threads, describe, refresh_s, start_distributed


@dataclass
class Run:
    """What was measured of one run on this rank.

    Attributes:
        losses: of every batch.
        batches_s: seconds of every batch.
        workers: ranks that trained each batch.
        events: re-packings.
        tokens: tokens of a batch.
    """

    losses: list[float] = field(default_factory=list)
    batches_s: list[float] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    events: list[RepackEvent] = field(default_factory=list)
    tokens: int = 0

    def tokens_per_s(self, batches: Sequence[int]) -> float:
        """Median throughput of some batches."""
        return self.tokens / statistics.median(self.batches_s[batch] for batch in batches)

    @property
    def mean_workers(self) -> float:
        """Ranks that trained a batch, on average."""
        return statistics.mean(self.workers)


def train(settings: Settings, tokens: Tokens, *, repack: bool) -> Run:
    """Train the job once, on all ranks or re-packed; does not return on ranks that are released.

    Args:
        settings: the job.
        tokens: the data.
        repack: whether ``"dynamic_pipeline"`` holds as configured, or nothing ever moves.

    Returns:
        What was measured.
    """
    run, rank = Run(), dist.get_rank()
    contender = build_contender(settings, tokens, dynamic=repack)
    run.tokens = contender.data.shape.tokens
    contender.engine.on_repack(lambda event: _tell(event, rank, run))
    label = "re-packed" if repack else "all ranks"
    batches = range(settings.run.batches)
    for batch in tqdm(batches, desc=label, unit="batch", disable=rank != 0, mininterval=refresh_s()):
        run.workers.append(dist.get_world_size())
        _train_batch(contender, batch)
    run.losses, run.batches_s = contender.measured.losses, contender.measured.batches_s
    contender.engine.destroy()  # re-packing replaces the process groups that it uses
    return run


def _train_batch(contender: Contender, batch: int) -> None:
    for _ in contender.train_window([batch], timed=True):
        pass


def _tell(event: RepackEvent, rank: int, run: Run) -> None:
    run.events.append(event)
    if event.released:
        tqdm.write(f"process {os.getpid()}, at first rank {rank}, has no layers any more and leaves with exit code 0")
    elif rank == 0:
        tqdm.write(str(event))


def table(everyone: Run, repacked: Run) -> str:
    """Set the numbers of workers side by side.

    Args:
        everyone: the run that kept all ranks.
        repacked: the run that did not.
    """
    rows = [["workers", "batches", "tokens/s", "a worker", "tokens/s with all", "a worker", "next batch after"]]
    after_s = {len(event.after) - 1: event.seconds for event in repacked.events}
    stages = {workers: workers for workers in repacked.workers}
    all_workers = everyone.workers[0]
    if repacked.events:
        replicas = all_workers // (len(repacked.events[0].before) - 1)
        stages = {workers: workers // replicas for workers in repacked.workers}
    for workers in sorted(set(repacked.workers), reverse=True):
        batches = [batch for batch, count in enumerate(repacked.workers) if count == workers]
        own, theirs = repacked.tokens_per_s(batches), everyone.tokens_per_s(batches)
        seconds = after_s.get(stages[workers])
        rows.append([
            str(workers), str(len(batches)), f"{own:,.0f}", f"{own / workers:,.0f}", f"{theirs:,.0f}",
            f"{theirs / all_workers:,.0f}", "" if seconds is None else f"{seconds:.2f} s",
        ])  # fmt: skip
    equal = "equal bits" if same_bits(everyone.losses, repacked.losses) else "DIFFER"
    return "\n".join([
        format_table(rows), "",
        f"average number of workers: {repacked.mean_workers:.2f} of {all_workers}",
        f"losses of all {len(everyone.losses)} batches: {equal}",
    ])  # fmt: skip


def run(settings: Settings) -> None:
    """Train both ways and report."""
    choose_threads(settings.run.threads)
    start_distributed()
    tokens, _ = load_data(settings.data, settings.model.vocab_size)
    environment = describe(settings)
    if dist.get_rank() == 0:
        clear(Path(settings.output_dir))
    everyone = train(settings, tokens, repack=False)
    repacked = train(settings, tokens, repack=True)
    if dist.get_rank() == 0:
        save(settings, environment, everyone, repacked)
    dist.barrier()
    dist.destroy_process_group()


def save(settings: Settings, environment: dict[str, Any], everyone: Run, repacked: Run) -> None:
    """Write results and picture into the output folder, and print the table."""
    folder = Path(settings.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    text = table(everyone, repacked)
    (folder / "table.txt").write_text(text + "\n", encoding="utf-8")
    runs = {name: dataclasses.asdict(run) for name, run in (("all ranks", everyone), ("re-packed", repacked))}
    equal = same_bits(everyone.losses, repacked.losses)
    results = environment | {"runs": runs, "losses_equal_bits": equal}
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"\n{text}\n")
    picture = save_workers(
        folder / "workers.png", workers=repacked.workers, batches_s=repacked.batches_s,
        all_batches_s=everyone.batches_s, tokens=repacked.tokens, title=f"scenario={settings.scenario}",
    )
    print(f"picture:     {picture}")
    print(f"all results: {folder / 'results.json'}")


if __name__ == "__main__":
    start(run, "scenarios.repack")
