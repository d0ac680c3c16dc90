"""Record the trace of a scenario's run: a static partition, profiled in every batch.

    python -m benchmarks.replay.record scenario=freezing
    python -m benchmarks.replay.record all             # the six scenarios, default model, about 10 minutes
    python -m benchmarks.replay.record scenario=moe model.depth=8 run.batches=40 --out moe_8.json

Overrides are those of ``scenarios.train``. The trace says which machine it is from, and its load.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from benchmarks.ranks import Send, on_ranks
from benchmarks.record import in_words, installed
from benchmarks.scenarios.contenders import read_settings
from benchmarks.traces import Source, Trace, TraceBatch
from dynpipe_ds import PipelineProfile
from scenarios.settings import Settings

SCENARIOS = ("pruning", "freezing", "early_exit", "moe", "mod", "sparse_attention")
FOLDER = Path(__file__).parents[1] / "traces" / "recorded"
QUIET_LOAD = 0.5  # above the number of ranks: more than this means that others computed as well


class _ForwardTimes:
    """Seconds of every forward of the local layers in a batch, for their dispersion among micro-batches."""

    def __init__(self, layers: dict[int, nn.Module]) -> None:
        self._began = 0.0
        self.seconds: dict[int, list[float]] = {index: [] for index in layers}
        for index, layer in layers.items():
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(lambda *_, index=index: self._end(index))

    def _begin(self, *_: Any) -> None:
        self._began = time.perf_counter()

    def _end(self, index: int) -> None:
        self.seconds[index].append(time.perf_counter() - self._began)

    def take(self) -> dict[int, list[float]]:
        """Relative standard deviation of every layer since the last call."""
        found = {}
        for index, seconds in self.seconds.items():
            mean = statistics.fmean(seconds) if seconds else 0.0
            found[index] = [statistics.pstdev(seconds) / mean if mean else 0.0]
            seconds.clear()
        return found


def trace_batch(batch: int, profile: PipelineProfile, dispersion: Sequence[float]) -> TraceBatch:
    """One profiled batch in the form of a trace.

    Args:
        batch: its number.
        profile: what the engine measured.
        dispersion: of every layer among the micro-batches.
    """
    layers = profile.layers
    frozen = next((i for i, layer in enumerate(layers) if layer.backward_s > 0), len(layers))
    return TraceBatch(
        batch,
        tuple(round(layer.forward_s, 7) for layer in layers),
        tuple(round(layer.backward_s, 7) for layer in layers),
        tuple(layer.parameter_bytes for layer in layers),
        frozen,
        tuple(round(d, 4) for d in dispersion),
    )


def record(settings: Settings, command: str) -> Trace:
    """Train the job once, statically; collective, the same trace on every rank.

    Args:
        settings: the job.
        command: for the trace's source.
    """
    from scenarios.compare import build_contender
    from scenarios.data import load_corpus
    from scenarios.scenario import gather_by_layer

    tokens = load_corpus(settings.data, settings.model.vocab_size).tokens
    contender = build_contender(settings.profiling_every_batch(), tokens, dynamic=False)
    engine, batches = contender.engine, []
    kind = "cpu" if engine.device.type == "cpu" else "gpu"
    times, loads = _ForwardTimes(engine.local_layers()), []
    for batch in range(settings.run.batches):
        contender.scenario.before_batch(engine, batch)
        engine.train_batch(contender.data.micro_batches(batch))
        contender.scenario.after_batch(engine, batch)
        spread = gather_by_layer(engine, times.take(), 1)[:, 0] / engine.mpu.get_data_parallel_world_size()
        profile = engine.last_batch_profile
        if profile is not None:
            # Hooks see a device's launches, not its work, so only a CPU's dispersion is known.
            batches.append(trace_batch(batch, profile, spread.tolist() if kind == "cpu" else ()))
        loads.append(os.getloadavg()[0])
    ranks = dist.get_world_size()
    load = statistics.median(loads)
    busy = "others computed as well, so times are too long and noisy" if load > ranks + QUIET_LOAD else "quiet"
    source = Source(
        kind,
        f"{command}; {in_words(installed())}; {get_accelerator().device_name()}; "
        f"{ranks} ranks of {torch.get_num_threads()} thread, partition "
        f"{list(engine.partition)}, {engine.gradient_accumulation_steps()} micro-batches; load {load:.1f} ({busy}); "
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d}",
        settings.seed,
    )
    name = f"{settings.scenario}, {settings.model.depth} blocks, recorded"
    names = tuple(layer.name for layer in profile.layers) if profile is not None else ()
    return Trace(name, source, names, settings.run.batches, tuple(batches))


def run_rank(send: Send, overrides: list[str], out: Path | None) -> None:
    """Record on this rank; the first says where the trace is."""
    settings = read_settings(overrides)
    trace = record(settings, f"python -m benchmarks.replay.record {' '.join(overrides)}")
    if dist.get_rank() == 0:
        send(trace.save(out or FOLDER / f"{settings.scenario}.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="+", metavar="OVERRIDE", help="as of scenarios.train; 'all': every scenario")
    parser.add_argument("--out", type=Path, help="file of the trace; default: benchmarks/traces/recorded/SCENARIO.json")
    options = parser.parse_args()
    first, *others = options.overrides
    if first == "all" and options.out:
        parser.error("--out: one file for six traces; record them one by one, or leave it out")
    for scenario in [f"scenario={name}" for name in SCENARIOS] if first == "all" else [first]:
        for path in on_ranks(2, run_rank, [scenario, *others], options.out):
            print(path, flush=True)


if __name__ == "__main__":
    main()
