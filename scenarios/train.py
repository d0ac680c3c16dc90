"""The training entry of all scenarios: one job, trained with a static and with a dynamic partition.

    deepspeed --no_local_rank --num_accelerators 2 --module scenarios.train scenario=freezing

Configuration by Hydra, from ``conf/``; every value can be changed on the command line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed
import hydra
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from dynpipe_ds.reporting.plots import save_comparison
from dynpipe_ds.reporting.table import RunSummary, comparison_table, same_bits
from scenarios.compare import Contender, build_contender, silence, train_in_turns
from scenarios.data import load_tokens
from scenarios.settings import Settings, config_folder


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
    if os.environ.get("RANK", "0") == "0":
        print("starting; the first time on a CPU, DeepSpeed compiles for half a minute", flush=True)
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    with silence():
        deepspeed.init_distributed(verbose=False)


def train(settings: Settings) -> tuple[Contender, Contender]:
    """Train the job both ways, with a progress bar on the first rank.

    Args:
        settings: the job.

    Returns:
        The static and the dynamic run, trained.

    Raises:
        ValueError: if a setting does not fit the model or the data.
    """
    tokens = load_tokens(
        settings.data_path, dtype=settings.data_dtype, vocab_size=settings.model.vocab_size,
        max_tokens=settings.data_max_tokens,
    )
    static = build_contender(settings, tokens, dynamic=False)
    dynamic = build_contender(settings, tokens, dynamic=True)
    first = dist.get_rank() == 0
    if first:
        dynamic.engine.on_rebalance(lambda event: tqdm.write(str(event), file=sys.stdout))
    notes: dict[str, Any] = {}
    # Once a window, since what a router does changes from batch to batch.
    told_after = {window[-1] for window in settings.run.windows()}
    bar = tqdm(total=2 * settings.run.batches, unit="batch", disable=not first, mininterval=0.5)
    with bar:
        for contender, batch in train_in_turns((static, dynamic), settings):
            if first and contender is dynamic and batch in told_after and contender.notes() != notes:
                notes = contender.notes()
                told = ", ".join(f"{name}: {value}" for name, value in notes.items())
                tqdm.write(f"after batch {batch + 1}: {told}", file=sys.stdout)
            rate = contender.data.shape.tokens / contender.batches_s[-1]
            bar.set_description(f"{contender.label:>7}", refresh=False)
            bar.set_postfix_str(
                f"loss {contender.losses[-1]:.3f}, {rate:,.0f} tokens/s", refresh=False
            )
            bar.update()
    return static, dynamic


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
        **dataclasses.asdict(summary),
        "tokens_per_s": summary.tokens_per_s,
        "final_loss": summary.final_loss,
        "batches_s": contender.batches_s,
        "stages_s": contender.stages_s,
        "rebalanced_at": contender.rebalanced_at,
        "reports": contender.reports,
        "recording": contender.recording,
    }


def save(settings: Settings, contenders: Sequence[Contender], runs: Sequence[RunSummary]) -> None:
    """Write the results and the picture into the output folder, and print table and paths."""
    static, dynamic = contenders
    folder = Path(settings.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    results = describe(settings) | {
        "runs": [run_as_values(*pair) for pair in zip(contenders, runs, strict=True)],
        "speedup": runs[1].tokens_per_s / runs[0].tokens_per_s,
        "losses_equal_bits": same_bits(runs[0].losses, runs[1].losses),
    }
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    table = comparison_table(runs[0], runs[1])
    (folder / "table.txt").write_text(table + "\n", encoding="utf-8")
    print(f"\n{table}\n")
    if static.stages_s and dynamic.stages_s:
        picture = save_comparison(
            folder / "stage_times.png",
            static_stages_s=static.last_stages_s(),
            dynamic_stages_s=dynamic.last_stages_s(),
            static_batches_s=static.batches_s,
            dynamic_batches_s=dynamic.batches_s,
            rebalanced_at=dynamic.rebalanced_at,
            title=f"scenario={settings.scenario}",
        )
        print(f"picture of the stage times: {picture}")
    print(f"all results:                {folder / 'results.json'}")


def run(settings: Settings) -> None:
    """Train both ways and report."""
    choose_threads(settings.run.threads)
    start_distributed()
    contenders = train(settings)
    runs = [contender.summary() for contender in contenders]
    if dist.get_rank() == 0:
        save(settings, contenders, runs)
    dist.barrier()
    dist.destroy_process_group()


@hydra.main(version_base=None, config_path=str(config_folder()), config_name="config")
def main(config: DictConfig) -> None:
    """Read the configuration and run; a user's mistake ends in one line, not in a traceback."""
    try:
        values: Any = OmegaConf.to_container(config, resolve=True)
        run(Settings.from_mapping(values))
    except ValueError as error:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(2)
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
