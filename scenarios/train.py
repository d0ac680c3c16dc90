"""The training entry of all scenarios: one job, trained with a static and with a dynamic partition.

    python -m scenarios.train scenario=freezing
    python -m scenarios.train --multirun scenario=freezing partition=uniform,parameters,optimal

It starts its ranks itself, as ``launch`` says. Configuration by Hydra, from ``conf/``; every value can be
changed on the command line. A run that was interrupted goes on from its last checkpoint when it is started again with
the same output folder.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from dynpipe_ds import FatalError, init_distributed
from dynpipe_ds.ranks import explaining_lost_ranks
from scenarios.begun import in_words
from scenarios.compare import Contender, build_contender, silence, train_in_turns
from scenarios.data import load_data
from scenarios.entry import start
from scenarios.export import export
from scenarios.machine import Reading, as_values, busy_words, count, since
from scenarios.opening import clear
from scenarios.ranks import end_as_asked, hear_warnings, rank
from scenarios.report.comparison import RunSummary, comparison_table, same_bits, same_partition, speedup
from scenarios.report.pictures import save_comparison
from scenarios.resume import InterruptedRunError, JobCheckpoints, begun_with
from scenarios.settings import SECTION, Settings, merge


def choose_threads(threads: int | None) -> int:
    """Set the number of CPU threads of this rank, so that ranks do not fight for cores.

    Args:
        threads: as configured; ``None`` for ``OMP_NUM_THREADS``, else an equal share of the cores.

    Returns:
        The number of threads set.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", "1")))
    if threads is None and "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    chosen = threads or max(1, (os.cpu_count() or 1) // max(1, local_ranks))
    torch.set_num_threads(chosen)
    return chosen


def start_distributed() -> None:
    """Join the process group that the launcher describes in the environment."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with silence():
        init_distributed()
    hear_warnings()


def build(settings: Settings) -> tuple[Contender, Contender]:
    """Build the static and the dynamic run of a job.

    Args:
        settings: the job.

    Raises:
        ValueError: if a setting does not fit the model or the data.
    """
    tokens, validation = load_data(settings.data, settings.model.vocab_size)
    static, dynamic = (
        build_contender(settings, tokens, validation=validation, dynamic=dynamic) for dynamic in (False, True)
    )
    return static, dynamic


def train(settings: Settings, contenders: tuple[Contender, Contender], checkpoints: JobCheckpoints) -> None:
    """Train what is left of the job both ways, with a progress bar on the first rank.

    Args:
        settings: the job.
        contenders: the static and the dynamic run.
        checkpoints: where their state is saved.

    Raises:
        InterruptedRunError: on every rank, if any was asked to end.
    """
    _, dynamic = contenders
    first = dist.get_rank() == 0
    if first:
        dynamic.engine.on_rebalance(lambda event: tqdm.write(str(event), file=sys.stdout))
    notes: dict[str, Any] = {}
    # Once a window, since what a router does changes from batch to batch.
    says_after = {window[-1] for window in settings.run.windows()}
    bar = tqdm(
        total=2 * settings.run.batches, initial=sum(len(contender.measured.losses) for contender in contenders),
        unit="batch", disable=not first, mininterval=refresh_s(),
    )  # fmt: skip
    with bar:
        for contender, batch in train_in_turns(contenders, settings, checkpoints.after_turn):
            if first and contender is dynamic and batch in says_after and telling(contender.notes()) != notes:
                notes = telling(contender.notes())
                values = ", ".join(f"{name}: {value}" for name, value in notes.items())
                tqdm.write(f"after batch {batch + 1}: {values}", file=sys.stdout)
            rate = contender.data.shape.tokens / contender.measured.batches_s[-1]
            bar.set_description(f"{contender.label:>7}", refresh=False)
            bar.set_postfix_str(
                f"loss {contender.measured.losses[-1]:.3f}, {rate:,.0f} tokens/s", refresh=False
            )
            bar.update()
            found = contender.measured.validations[-1] if contender.measured.validations else {}
            if first and found.get("after") == batch + 1:
                values = f"loss {found['loss']:.6f}, perplexity {found['perplexity']:.2f}"
                tqdm.write(f"after batch {batch + 1}: {contender.label} validation {values}", file=sys.stdout)
        for contender in contenders:
            contender.validate()


def telling(notes: Mapping[str, Any]) -> dict[str, Any]:
    """The notes that say something: "frozen layers: 0 of 14" does not."""
    return {name: value for name, value in notes.items() if not re.match(r"0(\.0*)?(%| |$)", str(value))}


def refresh_s() -> float:
    """Seconds between two states of a progress bar: a log file gets a line now and then."""
    return 0.5 if sys.stderr.isatty() else 30.0


def describe(settings: Settings) -> dict[str, Any]:
    """Return the job and the environment as values that JSON can hold."""
    job = dataclasses.asdict(settings)
    job["output_dir"] = str(settings.output_dir)
    environment = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "device": get_accelerator().device_name(),
        "ranks": dist.get_world_size(),
        "threads": torch.get_num_threads(),
    }
    return {"settings": job, "environment": environment}


def run_as_values(contender: Contender, summary: RunSummary) -> dict[str, Any]:
    """Return what was measured in a run as values that JSON can hold."""
    return {
        **dataclasses.asdict(contender.measured),
        **dataclasses.asdict(summary),
        "tokens_per_s": summary.tokens_per_s,
        "final_loss": summary.final_loss,
    }


def save(
    settings: Settings, contenders: Sequence[Contender], runs: Sequence[RunSummary], machine: Reading
) -> None:
    """Write the results and the picture into the output folder, and print table and paths.

    Args:
        settings: the job.
        contenders: the static and the dynamic run.
        runs: their summaries.
        machine: what others used of the first rank's machine while they trained.
    """
    static, dynamic = contenders
    folder = Path(settings.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    found = speedup(*runs)
    results = describe(settings) | {
        "runs": [run_as_values(*pair) for pair in zip(contenders, runs, strict=True)],
        "same_partition": same_partition(*runs),
        "speedup": found and found.value,
        "speedup_interval": found and [found.low, found.high],
        "losses_equal_bits": same_bits(runs[0].losses, runs[1].losses),
        "machine": as_values(machine),
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = "\n\n".join([*busy_words(machine.reasons()), comparison_table(*runs)])
    (folder / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n")
    if static.measured.stages_s and dynamic.measured.stages_s:
        picture = save_comparison(
            folder / "stage_times.png",
            static_stages_s=static.last_stages_s(),
            dynamic_stages_s=dynamic.last_stages_s(),
            static_batches_s=static.measured.batches_s,
            dynamic_batches_s=dynamic.measured.batches_s,
            rebalanced_at=dynamic.measured.rebalanced_at,
            title=f"scenario={settings.scenario}",
        )
        print(f"picture of the stage times: {picture}")
    print(f"all results:                {folder / 'results.json'}")


def run(settings: Settings) -> None:
    """Train both ways, from the start or from where an interrupted run has been, and report.

    Args:
        settings: the job.

    Raises:
        ValueError: if a setting does not fit, or the output folder holds an interrupted run with other ones.
        InterruptedRunError: if it was asked to end.
    """
    if merge({SECTION: {"repack": {}}}, settings.deepspeed)[SECTION]["repack"].get("enabled"):
        raise ValueError(
            "ds.dynamic_pipeline.repack.enabled=true: two runs train here at the same time and would lose each "
            "other's ranks; use --module scenarios.repack"
        )
    choose_threads(settings.run.threads)
    start_distributed()
    settings = settings.decided(settings.run.num_stages or dist.get_world_size(), begun_with(settings))
    contenders = build(settings)
    checkpoints = JobCheckpoints(settings, contenders)
    checkpoints.listen()
    try:
        trained = checkpoints.resume()
        if trained is not None and dist.get_rank() == 0:
            after, batches = in_words(trained), settings.run.batches
            print(f"continuing an interrupted run after {after} of {batches}", flush=True)
        if dist.get_rank() == 0:
            clear(Path(settings.output_dir))
        before = count()
        train(settings, contenders, checkpoints)
        machine = since(before)
        runs = [contender.summary() for contender in contenders]
        if dist.get_rank() == 0:
            save(settings, contenders, runs, machine)
        export(contenders[1].engine, contenders[1].scenario, settings)
        if settings.run.export is not None and dist.get_rank() == 0:
            print(f"trained model:              {settings.run.export}")
        checkpoints.discard()
    except RuntimeError:
        with explaining_lost_ranks("the job was trained", lambda: checkpoints.newest):
            raise
    dist.destroy_process_group()


def main(settings: Settings) -> None:
    """Run the job; being interrupted, or a failure that ends all ranks, is one line."""
    try:
        run(settings)
    except InterruptedRunError as error:
        if rank() == 0:
            print(f"\n{error}", flush=True)
        end_as_asked(signal.SIGTERM)
    except FatalError as error:
        sys.exit(f"error: {error}; the same command continues from the last checkpoint of both runs, if there is one")


if __name__ == "__main__":
    start(main, "scenarios.train", sweeps=True, resumes=True)
