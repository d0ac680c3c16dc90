"""Replay: layers that sleep as long as a profile says, under the real engine; simulated against measured.

python -m benchmarks.simulation.main [--stages 2 4 8 --batches 5 --scale 1]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.launch import environment, launch
from dynpipe_ds.partition import optimal
from dynpipe_ds.profile import LayerProfile, PipelineProfile
from dynpipe_ds.simulation import Simulation, Workload, simulate

LAYERS_PER_STAGE = 3
MICRO_BATCHES_PER_STAGE = 2
WARM_UP = 2
LINK_ROUNDS = 50
CASES = ("equal", "unequal, uniform cut", "unequal, best cut", "frozen third")


def replayed(case: str, num_stages: int, scale: float) -> PipelineProfile:
    """A profile with a partition: an embedding, sleeping layers, a head; only the middle takes time."""
    num_naps = LAYERS_PER_STAGE * num_stages
    rng = np.random.default_rng(num_stages)
    costs = rng.lognormal(0.0, 0.6, num_naps) if case.startswith("unequal") else np.ones(num_naps)
    naps = [(0.01 * scale * cost, 0.02 * scale * cost) for cost in costs.tolist()]
    seconds = [(0.0, 0.0), *naps, (0.0, 0.0)]
    if case == "frozen third":
        seconds = [(f, 0.0 if i <= num_stages else b) for i, (f, b) in enumerate(seconds)]
    boundaries = [0, *(1 + LAYERS_PER_STAGE * s for s in range(1, num_stages)), num_naps + 2]
    if case.endswith("best cut"):
        boundaries = list(optimal([f + b for f, b in seconds], num_stages).boundaries)
    layers = tuple(LayerProfile(f"layer {i}", f, b, 1, 4, 4, 8, 1) for i, (f, b) in enumerate(seconds))
    return PipelineProfile(0, tuple(boundaries), MICRO_BATCHES_PER_STAGE * num_stages, layers, ())


def build(profile: PipelineProfile) -> Any:
    """The real engine, with a layer that sleeps for each layer of the profile."""
    import deepspeed

    from dynpipe_ds import DynamicPipelineModule
    from tests.distributed.models import loss_fn
    from tests.distributed.sleeping import napping

    torch.manual_seed(7)
    naps = [(layer.forward_s, layer.backward_s) for layer in profile.layers[1:-1]]
    module = DynamicPipelineModule(
        napping(naps), num_stages=len(profile.boundaries) - 1, loss_fn=loss_fn,
        partition_method=list(profile.boundaries),
    )
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": profile.num_micro_batches,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dynamic_pipeline": {"enabled": True, "rebalance_every": "never"},
    }
    engine = deepspeed.initialize(model=module, config=config)[0]
    frozen = next(i for i, (_, backward_s) in enumerate(naps, start=1) if backward_s > 0)
    for index, layer in engine.local_layers().items():
        layer.requires_grad_(frozen == 1 or index >= frozen)
    return engine


def one_way_s(engine: Any) -> list[float]:
    """Seconds of one message between neighbours, boundary by boundary, the same list on every rank."""
    from deepspeed.runtime.pipe import p2p

    from tests.distributed.models import HIDDEN, LENGTH

    stage, message = engine.stage_id, torch.zeros(2, LENGTH, HIDDEN)
    found = torch.zeros(engine.num_stages - 1, dtype=torch.float64)
    for boundary in range(engine.num_stages - 1):
        torch.distributed.barrier()
        began = time.perf_counter()
        for _ in range(LINK_ROUNDS if stage in (boundary, boundary + 1) else 0):
            if stage == boundary:
                p2p.send(message, stage + 1)
                p2p.recv(message, stage + 1)
            else:
                p2p.recv(message, stage - 1)
                p2p.send(message, stage - 1)
        if stage == boundary:
            found[boundary] = (time.perf_counter() - began) / LINK_ROUNDS / 2
    torch.distributed.all_reduce(found)
    return list(found.tolist())


def measure(engine: Any, num_batches: int) -> list[PipelineProfile]:
    """Train, and give the profile of every batch after the first ones."""
    from tests.distributed.models import data

    batches, profiles = data(0, engine.gradient_accumulation_steps()), []
    for _ in range(WARM_UP + num_batches):
        torch.distributed.barrier()
        engine.train_batch(batches)
        profiles.append(engine.last_batch_profile)
    return profiles[WARM_UP:]


def run_rank(num_batches: int, scale: float, path: Path) -> None:
    """Replay all cases on this rank; the first writes what came out."""
    import deepspeed

    torch.set_num_threads(1)
    with contextlib.suppress(PermissionError):
        # Ranks sleep nearly all the time; where allowed, they wake up before whatever else computes here.
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    with contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(verbose=False)
        rows = [replay(case, num_batches, scale) for case in CASES]
    if torch.distributed.get_rank() == 0:
        path.write_text("\n".join(rows))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def replay(case: str, num_batches: int, scale: float) -> str:
    """Run one case; a line of the table."""
    told = replayed(case, torch.distributed.get_world_size(), scale)
    engine = build(told)
    links_s = one_way_s(engine)
    profiles = measure(engine, num_batches)
    steps_s = [[stage.step_s for stage in profile.stages] for profile in profiles]
    measured_s = [max(stage.batch_s for stage in profile.stages) for profile in profiles]

    def simulated(profile: PipelineProfile, step_s: list[float]) -> Simulation:
        links: dict[str, Any] = {"activation_link_s": links_s, "gradient_link_s": links_s}
        return simulate(Workload.from_profile(profile, told.boundaries, step_s=step_s, **links))

    median = statistics.median
    from_told = simulated(told, [median(stage) for stage in zip(*steps_s, strict=True)])
    # Each batch by its own profile: whatever else the machine does then slows down both.
    own = [simulated(profile, step_s) for profile, step_s in zip(profiles, steps_s, strict=True)]
    errors = sorted(s.batch_s / took_s - 1 for s, took_s in zip(own, measured_s, strict=True))
    return (
        f"| {engine.num_stages} | {engine.gradient_accumulation_steps()} | {case} | {median(measured_s):.3f} "
        f"| {from_told.batch_s:.3f} ({from_told.batch_s / median(measured_s) - 1:+.1%}) "
        f"| {median(s.batch_s for s in own):.3f} ({median(errors):+.1%}; {errors[0]:+.1%} to {errors[-1]:+.1%}) "
        f"| {median(p.bubble_ratio for p in profiles):.3f} | {median(s.bubble_ratio for s in own):.3f} "
        f"| {1e3 * median(links_s):.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="1: a typical layer sleeps 10 + 20 ms")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(options.batches, options.scale, options.out)
        return
    print(environment())
    print(
        "| stages | micro-batches | replay | measured, s | simulated from the replayed profile, s "
        "| simulated from each batch's own profile, s | bubble ratio measured | simulated | one message, ms |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for num_stages in options.stages:
            out = Path(folder) / "rows.md"
            arguments = (f"--batches={options.batches}", f"--scale={options.scale}", f"--out={out}")
            launch("benchmarks.simulation.main", num_stages, *arguments)
            print(out.read_text(), f"load {os.getloadavg()[0]:.1f}", sep="\n", flush=True)


if __name__ == "__main__":
    main()
