"""Record the trace of a scenario's run: a static partition, profiled in every batch.

    python -m benchmarks.replay.record scenario=freezing
    python -m benchmarks.replay.record all             # the six scenarios, default model, about 10 minutes
    python -m benchmarks.replay.record scenario=moe model.depth=8 run.batches=40 +record.out=moe_8.json

Overrides are those of ``scenarios.train``. The trace says which machine it is from, and its load.
"""

from __future__ import annotations

import datetime
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import torch
from deepspeed.accelerator import get_accelerator
from omegaconf import DictConfig, OmegaConf
from torch import nn

from benchmarks.launch import launch
from benchmarks.record import in_words, installed
from benchmarks.traces import Source, Trace, TraceBatch
from dynpipe_ds import PipelineProfile
from scenarios.settings import Settings, config_folder

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
    ranks = torch.distributed.get_world_size()
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


@hydra.main(version_base=None, config_path=str(config_folder()), config_name="config")
def _rank(config: DictConfig) -> None:
    from scenarios.train import choose_threads, start_distributed

    values: Any = OmegaConf.to_container(config, resolve=True)
    out = (values.pop("record", None) or {}).get("out")
    settings = Settings.from_mapping(values)
    choose_threads(settings.run.threads)
    start_distributed()
    overrides = " ".join(word for word in sys.argv[1:] if "record.out" not in word)
    trace = record(settings, f"python -m benchmarks.replay.record {overrides}")
    if torch.distributed.get_rank() == 0:
        print(trace.save(out or FOLDER / f"{settings.scenario}.json"), flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        _rank()
        return
    overrides = sys.argv[1:]
    if overrides[:1] == ["all"]:
        for scenario in SCENARIOS:
            launch("benchmarks.replay.record", 2, f"scenario={scenario}", *overrides[1:])
        return
    launch("benchmarks.replay.record", 2, *overrides)


if __name__ == "__main__":
    main()
