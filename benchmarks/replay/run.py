"""Replay traces on the real engine: real messages, profiles, decisions, migrations; layers that wait.

python -m benchmarks.replay.run --trace model:freezing:24 --stages 4 --batches 20 --methods all
python -m benchmarks.replay.run --trace benchmarks/traces/recorded/moe.json --stages 2 --methods "optimal:time, auto"
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, TextIO

import torch
import torch.distributed as dist

from benchmarks.launch import environment, launch
from benchmarks.ranks import now_s, start_rank
from benchmarks.replay.case import (
    METHODS,
    PARAMETERS_A_LAYER,
    WARM_UP,
    Case,
    Move,
    Result,
    first_boundaries,
    frozen_boundaries,
)
from benchmarks.replay.layers import WIDTH, ReplayLayer, loss_fn, micro_batches
from benchmarks.traces import TraceBatch
from scenarios.launch import free_port

OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


class Replay:
    """One run on this rank.

    Args:
        case: the run.
    """

    def __init__(self, case: Case) -> None:
        import deepspeed
        from deepspeed.pipe import LayerSpec

        from dynpipe_ds import DynamicPipelineModule

        self.case, self.trace, method = case, case.load_trace(), METHODS[case.method]
        mean_parameters = sum(self.trace.batches[0].parameter_bytes) / 4 / len(self.trace.layers)
        self.parameter_scale = PARAMETERS_A_LAYER / mean_parameters
        counts = self._parameter_counts(self.trace.batches[0])
        self.first_boundaries = first_boundaries(method, self.trace, case.num_stages)
        module = DynamicPipelineModule(
            [LayerSpec(ReplayLayer, index, count) for index, count in enumerate(counts)],
            num_stages=case.num_stages, loss_fn=loss_fn, partition_method=self.first_boundaries,
        )
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": case.num_micro_batches,
            "steps_per_print": 10**9, "optimizer": OPTIMIZER,
            "dynamic_pipeline": method.section(case.every, case.speeds),
        }
        self.engine: Any = deepspeed.initialize(model=module, config=config)[0]
        self.moves: list[Move] = []
        self.engine.on_rebalance(self._note)
        self._counts = counts
        self._links: _Links | None = _Links(self.engine) if case.link_ms else None

    def run(self) -> Result:
        """Train all batches; the same result on every rank but for the clock of the first."""
        case, batches_s, losses, profiles = self.case, [], [], []
        message_s = one_way_s(self.engine)
        for batch in range(case.num_batches):
            if batch == WARM_UP:
                began, before, first_moves = now_s(), self._overheads(), len(self.moves)
            data = iter(micro_batches(1000 * case.seed + batch, case.num_micro_batches))
            start_s = time.perf_counter()
            self._set(self.trace.at(batch, case.num_batches), batch)
            losses.append(float(self.engine.train_batch(data)))
            batches_s.append(time.perf_counter() - start_s)
            profiles.append(self.engine.last_batch_profile)
        wall_s = now_s() - began
        profiling_s, planning_s = (b - a for a, b in zip(before, self._overheads(), strict=True))
        return Result(
            case=case, kind="replay", wall_s=wall_s, batches_s=batches_s,
            bubbles=[profile.bubble_ratio for profile in profiles],
            stages_s=[[stage.busy_s for stage in profile.stages] for profile in profiles],
            moves=self.moves, profiling_s=profiling_s, planning_s=planning_s,
            migrating_s=sum(move.migrate_s for move in self.moves[first_moves:]),
            parameter_scale=self.parameter_scale, first_boundaries=self.first_boundaries, losses=losses,
            layers_s=[[[layer.forward_s, layer.backward_s] for layer in profile.layers] for profile in profiles],
            engine_s=[max(stage.batch_s for stage in profile.stages) for profile in profiles],
            step_s=[
                median(step_s) for step_s in zip(*([s.step_s for s in p.stages] for p in profiles), strict=True)
            ],
            message_s=message_s,
        )

    def _set(self, moment: TraceBatch, batch: int) -> None:
        """Give the local layers their times, parameters and frozenness of a batch."""
        stage, layers = self.engine.stage_id, self.engine.local_layers()
        factors = self.case.micro_batch_factors(moment, batch) / self.case.speeds[stage]
        self._resize(moment)
        for index, layer in layers.items():
            layer.requires_grad_(index >= moment.frozen_layers)
            forward_s = (moment.forward_s[index] * factors[index]).tolist()
            layer.set_batch(forward_s, (moment.backward_s[index] * factors[index]).tolist())
        if self._links is not None:
            self._links.set_batch(*self.case.links_s(batch), frozen_boundaries(moment, self.engine.partition))

    def _parameter_counts(self, moment: TraceBatch) -> list[int]:
        return [max(1, round(size / 4 * self.parameter_scale)) for size in moment.parameter_bytes]

    def _resize(self, moment: TraceBatch) -> None:
        """Shrink the parameters as the trace's were pruned; their optimizer state follows."""
        from dynpipe_ds import ParameterReplacement

        counts = self._parameter_counts(moment)
        if counts == self._counts:
            return
        self._counts, replacements = counts, []
        for index, layer in self.engine.local_layers().items():
            count = min(counts[index], layer.weight.numel())
            if count < layer.weight.numel():
                fewer = torch.nn.Parameter(layer.weight.detach()[:count].clone())
                carry: Callable[[torch.Tensor], torch.Tensor] = lambda tensor, count=count: tensor[:count]  # noqa: E731
                replacements.append(ParameterReplacement(layer, "weight", fewer, carry))
        self.engine.replace_parameters(replacements)

    def _note(self, event: Any) -> None:
        self.moves.append(
            Move(event.batch, list(event.after), event.plan_s, event.migrate_s, event.bytes_moved)
        )

    def _overheads(self) -> tuple[float, float]:
        return self.engine.overhead.profiling_s, self.engine.overhead.planning_s


class _Links:
    """Makes messages of an engine take longer: both sides wait after they have met."""

    def __init__(self, engine: Any) -> None:
        from deepspeed.runtime.pipe import schedule

        self._stage, self._frozen = engine.stage_id, 0
        self._seconds: tuple[Any, Any] = ((), ())
        self._sent: dict[type, int] = {}
        # Kind of message: activation or gradient, and where its boundary lies from this stage.
        kinds = {
            schedule.SendActivation: (0, 0), schedule.RecvActivation: (0, -1),
            schedule.SendGrad: (1, -1), schedule.RecvGrad: (1, 0),
        }
        own = dict(engine._INSTRUCTION_MAP)
        slow = {kind: self._slowed(kind, own[kind], *place) for kind, place in kinds.items()}
        engine._INSTRUCTION_MAP = own | slow

    def set_batch(self, activation_s: Any, gradient_s: Any, frozen: int) -> None:
        self._seconds, self._frozen, self._sent = (activation_s, gradient_s), frozen, {}

    def _slowed(self, kind: type, function: Any, payload: int, shift: int) -> Callable[..., None]:
        def run(engine: Any, **kwargs: Any) -> None:
            function(engine, **kwargs)
            boundary, number = self._stage + shift, self._sent.get(kind, 0)
            self._sent[kind] = number + 1
            if payload == 0 or boundary >= self._frozen:
                time.sleep(float(self._seconds[payload][boundary, number]))

        return run


def one_way_s(engine: Any, rounds: int = 20) -> list[float]:
    """Seconds of one message between neighbours, boundary by boundary, the same list on every rank.

    Args:
        engine: an engine before training.
        rounds: there and back.
    """
    from deepspeed.runtime.pipe import p2p

    stage, message = engine.stage_id, torch.zeros(1, WIDTH)
    found = torch.zeros(engine.num_stages - 1, dtype=torch.float64)
    for boundary in range(engine.num_stages - 1):
        if stage not in (boundary, boundary + 1):
            continue
        times = []
        for _ in range(rounds):
            began = time.perf_counter()
            if stage == boundary:
                p2p.send(message, stage + 1)
                p2p.recv(message, stage + 1)
            else:
                p2p.recv(message, stage - 1)
                p2p.send(message, stage - 1)
            times.append(time.perf_counter() - began)
        if stage == boundary:
            found[boundary] = median(times) / 2
    dist.all_reduce(found)
    return list(found.tolist())


def replay_all(cases: Sequence[Case], out: Path) -> None:
    """Run cases one after the other on this rank; the first rank writes a line for each when it is done.

    Args:
        cases: all with as many stages as there are ranks.
        out: file of JSON lines.
    """
    _wake_first()
    for case in cases:
        start_rank()  # a world of its own for every run: an engine makes process groups and never gives them back
        with contextlib.redirect_stdout(io.StringIO()):
            result = Replay(case).run()
        if dist.get_rank() == 0:
            with out.open("a") as file:
                file.write(json.dumps(result.as_values()) + "\n")
        _leave()


def _wake_first() -> None:
    """Ranks sleep nearly all the time; where allowed, they wake up before whatever else computes here."""
    with contextlib.suppress(PermissionError):
        if hasattr(os, "sched_setscheduler"):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        else:
            os.setpriority(os.PRIO_PROCESS, 0, -15)


def _leave() -> None:
    """End this world; the next one meets at another port, since late ranks could still reach the old one."""
    import deepspeed.comm.comm as deepspeed_comm

    port = [free_port() if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(port, src=0)
    os.environ["MASTER_PORT"] = str(port[0])
    dist.barrier()
    dist.destroy_process_group()
    deepspeed_comm.cdb = None
    # Every group has threads that look for messages a hundred times a second until nobody knows the group any more.
    gc.collect()


def run_cases(cases: Sequence[Case]) -> Iterator[Result]:
    """Replay cases, one launch for every number of stages; yields them as they finish.

    Args:
        cases: runs.
    """
    with tempfile.TemporaryDirectory() as folder:
        for num_stages in dict.fromkeys(case.num_stages for case in cases):
            jobs, out = Path(folder) / f"jobs{num_stages}.json", Path(folder) / f"results{num_stages}.jsonl"
            here = [case for case in cases if case.num_stages == num_stages]
            jobs.write_text(json.dumps([asdict(case) for case in here]))
            out.touch()
            with ThreadPoolExecutor(1) as background, out.open() as lines:
                done = background.submit(
                    launch, "benchmarks.replay.run", num_stages, f"--jobs={jobs}", f"--out={out}"
                )
                while True:
                    ended = done.done()  # asked first: what was written before is read below
                    yield from (Result.from_values(json.loads(line)) for line in _whole_lines(lines))
                    if ended:
                        break
                    wait([done], timeout=1)
                done.result()


def _whole_lines(file: TextIO) -> Iterator[str]:
    """What was added since the last call, up to the last line that is complete."""
    while True:
        start = file.tell()
        line = file.readline()
        if not line.endswith("\n"):
            file.seek(start)
            return
        yield line


def describe(result: Result) -> str:
    """One line for a person.

    Args:
        result: of a run.
    """
    case = result.case
    return (
        f"{case.trace} | S={case.num_stages} M={case.num_micro_batches} | {case.method:22} | "
        f"{result.throughput:7.2f} micro-batches/s | last {result.last_throughput():7.2f} | "
        f"bubble {result.bubbles[WARM_UP]:.3f} -> {result.last_bubble():.3f} | "
        f"overhead {result.overhead():.2%} | {len(result.moves)} moves | {result.kind}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", nargs="+", default=["model:freezing:24"])
    parser.add_argument("--stages", type=int, nargs="+", default=[2])
    parser.add_argument("--micro-batches-per-stage", type=int, default=2)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--layer-ms", type=float, default=30.0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--methods", nargs="+", default=["all"], help="'all' or labels: " + "; ".join(METHODS))
    parser.add_argument("--save", type=Path, help="file of JSON lines for the results")
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" in os.environ:
        replay_all([Case(**job) for job in json.loads(options.jobs.read_text())], options.out)
        return
    methods = list(METHODS) if options.methods == ["all"] else options.methods
    try:  # here, before any rank starts
        cases = [
            Case(trace, method, stages, options.micro_batches_per_stage * stages, options.batches, options.layer_ms,
                 options.every)
            for trace in options.trace for stages in options.stages for method in methods
        ]
        for case in cases:
            num_blocks = len(case.load_trace().layers) - 2  # without embedding and head
            if num_blocks < case.num_stages:
                raise ValueError(f"--stages {case.num_stages}: {case.trace} has only {num_blocks} blocks")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(environment(), "replay: layers wait, they don't compute", sep="\n", flush=True)
    for result in run_cases(cases):
        print(describe(result), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(result.as_values()) + "\n")


if __name__ == "__main__":
    main()
