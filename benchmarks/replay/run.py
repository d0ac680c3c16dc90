"""Replay traces on the real engine: real messages, profiles, decisions, migrations; layers that are told their time.

python -m benchmarks.replay.run --trace model:freezing:24 --stages 4 --batches 20 --methods all
python -m benchmarks.replay.run --trace benchmarks/traces/recorded/moe.json --stages 2 --methods "optimal:time, auto"
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.forked import run_forked
from benchmarks.ranks import start_rank
from benchmarks.record import in_words, installed
from benchmarks.replay.case import (
    CLOCKS,
    COSTS,
    METHODS,
    PARAMETERS_A_LAYER,
    WARM_UP,
    Case,
    Move,
    Result,
    first_boundaries,
)
from benchmarks.replay.clocks import Pass, ReplayClock, SleepingClock, VirtualClock
from benchmarks.replay.layers import ReplayLayer, loss_fn, micro_batches
from benchmarks.replay.travelling import timed_messages, virtual_time
from benchmarks.traces import TraceBatch
from dynpipe_ds.measure import use_clock
from dynpipe_ds.ranks import reserved_port
from dynpipe_ds.schedule import Order
from dynpipe_ds.simulation import simulate

IN_WORDS = {
    "virtual": "replay: the real engine in virtual time; layers don't compute",
    "sleeping": "sleeping replay: the real engine; layers wait, they don't compute",
}
OPTIMIZER = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}


@contextlib.contextmanager
def time_of(case: Case) -> Iterator[ReplayClock]:
    """The clock of a case, which engines made inside read; inside, messages take virtual time, or a link's, along.

    Args:
        case: a run.
    """
    if case.clock == "sleeping":
        sleeping = SleepingClock()
        use_clock(sleeping)
        try:
            with (
                timed_messages(sleeping) if case.link_ms else contextlib.nullcontext(),
                _waiting_for_sends() if case.sends == "waited" else contextlib.nullcontext(),
            ):
                yield sleeping
        finally:
            use_clock(None)
    else:
        byte_scale = 1.0 if case.costs == "unscaled" else 1 / parameter_scale(case)
        with virtual_time(VirtualClock(case.known_costs(), byte_scale)) as virtual:
            yield virtual


@contextlib.contextmanager
def _waiting_for_sends() -> Iterator[None]:
    """Let a send between stages be over when its message is sent; layers move as ever."""
    send, operation = dist.isend, dist.P2POp

    def run(*args: Any, **kwargs: Any) -> Any:
        work = send(*args, **kwargs)
        assert work is not None
        work.wait()
        return _Over()  # gloo's own would wait for ever when it is asked a second time

    def of_a_move(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return operation(send if op is run else op, *args, **kwargs)

    with patch.object(dist, "isend", run), patch.object(dist, "P2POp", of_a_move):
        yield


class _Over:
    """A message that has been sent."""

    def wait(self) -> None:
        """Go on at once."""


class Replay:
    """One run on this rank.

    Args:
        case: the run.
        clock: as :func:`time_of` gives it.
    """

    def __init__(self, case: Case, clock: ReplayClock) -> None:
        import deepspeed
        from deepspeed.pipe import LayerSpec

        from dynpipe_ds import DynamicPipelineModule

        self.case, self.clock, self.trace, method = case, clock, case.load_trace(), METHODS[case.method]
        self.parameter_scale = parameter_scale(case)
        counts = self._parameter_counts(self.trace.batches[0])
        self.first_boundaries = first_boundaries(method, self.trace, case.num_stages)
        module = DynamicPipelineModule(
            [LayerSpec(ReplayLayer, index, count, 4 * count) for index, count in enumerate(counts)],
            num_stages=case.num_stages, loss_fn=loss_fn, partition_method=self.first_boundaries,
        )
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": case.num_micro_batches,
            "steps_per_print": 10**9, "optimizer": OPTIMIZER,
            "dynamic_pipeline": method.section(case.every, case.stage_speeds),
        }
        self.engine: Any = deepspeed.initialize(model=module, config=config)[0]
        self.moves: list[Move] = []
        self.engine.on_rebalance(self._note)
        self._replica = self.engine.grid.get_data_parallel_id()
        self._speed = float(case.worker_speeds[self.engine.stage_id, self._replica])
        self._counts = counts
        _tell_passes(self.engine, clock)
        self._links: _Links | None = None
        if case.link_ms or case.clock == "virtual":
            self._links = _Links(self.engine, clock, case.known_costs().message_s if case.clock == "virtual" else 0.0)
        if case.clock == "virtual":
            step_s = case.known_costs().step_s
            self.engine.optimizer.register_step_post_hook(lambda *_: clock.advance(step_s))

    def run(self) -> Result:
        """Train all batches; the same result on every rank but for the clock of the first."""
        case, clock, batches_s, losses, profiles = self.case, self.clock, [], [], []
        machine_s, between_s, leaves = -time.perf_counter(), case.known_costs().batch_s, dict(case.leaves)
        ran: list[tuple[Sequence[int], Order]] = []
        for batch in range(case.num_batches):
            if batch in leaves:
                self.engine.repack(leaves[batch])
            if batch == WARM_UP:
                began_s, before, first_moves = self._now_s(), self._overheads(), len(self.moves)
            data = iter(micro_batches(1000 * case.seed + batch, case.num_micro_batches))
            boundaries, pipeline = self.engine.partition, self.engine.dynamic.pipeline
            start_s = clock.now_s()
            self._set(self.trace.at(batch, case.num_batches), batch)
            losses.append(float(self.engine.train_batch(data)))
            if case.clock == "virtual":
                clock.advance(between_s)
            ran.append((boundaries, pipeline.order_for(case.num_micro_batches, len(boundaries) - 1)))
            batches_s.append(clock.now_s() - start_s)
            profiles.append(self.engine.last_batch_profile)
        wall_s = self._now_s() - began_s
        profiling_s, planning_s = (b - a for a, b in zip(before, self._overheads(), strict=True))
        works = clock.works_s if isinstance(clock, SleepingClock) else {}
        return Result(
            case=case, kind="replay" if case.clock == "virtual" else "sleeping replay", wall_s=wall_s,
            batches_s=batches_s, bubbles=[profile.bubble_ratio for profile in profiles],
            stages_s=[[stage.busy_s for stage in profile.stages] for profile in profiles],
            moves=self.moves, profiling_s=profiling_s, planning_s=planning_s,
            migrating_s=sum(move.migrate_s for move in self.moves[first_moves:]),
            parameter_scale=self.parameter_scale, first_boundaries=self.first_boundaries, losses=losses,
            layers_s=[[[x.forward_s, x.backward_s, x.weight_s] for x in profile.layers] for profile in profiles],
            engine_s=[max(stage.batch_s for stage in profile.stages) for profile in profiles],
            told_s=[] if leaves else [self._told_s(batch, *it) for batch, it in enumerate(ran)],
            num_orders=len({order for _, order in ran}),
            step_s=[
                median(profile.stages[stage].step_s for profile in profiles if len(profile.stages) > stage)
                for stage in range(len(profiles[0].stages))
            ],
            machine_s=machine_s + time.perf_counter(), works_s={kind: median(works[kind]) for kind in works},
        )

    def _told_s(self, batch: int, boundaries: Sequence[int], order: Order) -> float:
        """Simulated seconds of a batch in an order: layers, links and messages as told, nothing else."""
        case, moment, costs = self.case, self.trace.at(batch, self.case.num_batches), self.case.told_costs()
        workloads = (case.workload(moment, boundaries, batch, replica=r, costs=costs) for r in range(case.replicas))
        return max(simulate(workload, order).batch_s for workload in workloads)

    def _now_s(self) -> float:
        """The time at which all ranks are here."""
        dist.barrier()
        return self.clock.now_s()

    def _set(self, moment: TraceBatch, batch: int) -> None:
        """Give the local layers their times, parameters and frozenness of a batch."""
        factors = self.case.micro_batch_factors(moment, batch, self._replica) / self._speed
        self._resize(moment)
        for index, layer in self.engine.local_layers().items():
            layer.requires_grad_(index >= moment.frozen_layers)
            forward_s = (moment.forward_s[index] * factors[index]).tolist()
            backward_s = (moment.backward_s[index] * factors[index]).tolist()
            layer.set_batch(forward_s, backward_s, self.case.weight_share)
        if self._links is not None:
            self._links.set_batch(*self.case.links_s(batch))

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


_PASSES: dict[str, Pass] = {
    "ForwardPass": "forward", "BackwardPass": "backward", "BackwardInput": "backward", "BackwardWeight": "weight",
}  # fmt: skip


def _tell_passes(engine: Any, clock: ReplayClock) -> None:
    """Let an engine's instructions tell the clock which pass the layers belong to that follow."""

    def telling(kind: Pass, function: Callable[..., None]) -> Callable[..., None]:
        def run(engine: Any, **kwargs: Any) -> None:
            clock.begin(kind)
            function(engine, **kwargs)

        return run

    engine._INSTRUCTION_MAP = {
        instruction: telling(_PASSES[instruction.__name__], function) if instruction.__name__ in _PASSES else function
        for instruction, function in engine._INSTRUCTION_MAP.items()
    }


class _Links:
    """Says how long what an engine receives travels.

    Args:
        engine: receives.
        clock: of its rank.
        message_s: seconds of any message.
    """

    def __init__(self, engine: Any, clock: ReplayClock, message_s: float) -> None:
        from deepspeed.runtime.pipe import schedule

        self._engine, self._clock, self._message_s, self._frozen = engine, clock, message_s, 0
        self._seconds: tuple[Any, Any] = ((), ())
        self._received: dict[type, int] = {}
        # Kind of message: activation or gradient, and where its boundary lies from this stage.
        kinds = {schedule.RecvActivation: (0, -1), schedule.RecvGrad: (1, 0)}
        own = dict(engine._INSTRUCTION_MAP)
        engine._INSTRUCTION_MAP = own | {kind: self._timed(kind, own[kind], *place) for kind, place in kinds.items()}

    def set_batch(self, activation_s: Any, gradient_s: Any) -> None:
        self._seconds, self._received = (activation_s, gradient_s), {}

    def _timed(self, kind: type, function: Any, payload: int, shift: int) -> Callable[..., None]:
        def run(engine: Any, **kwargs: Any) -> None:
            boundary, number = self._engine.stage_id + shift, self._received.get(kind, 0)
            self._received[kind] = number + 1
            link_s = float(self._seconds[payload][boundary, number]) + self._message_s
            with self._clock.arrivals.receiving((payload, boundary), link_s):
                function(engine, **kwargs)

        return run


def parameter_scale(case: Case) -> float:
    """Bytes of a replay layer for one of the trace's.

    Args:
        case: a run.
    """
    trace = case.load_trace()
    return PARAMETERS_A_LAYER / (sum(trace.batches[0].parameter_bytes) / 4 / len(trace.layers))


def replay_all(send: Callable[[Result], None], cases: Sequence[Case]) -> None:
    """Run cases one after the other on this rank.

    Args:
        send: takes a result as soon as it is there; the first rank's arrives.
        cases: all with as many ranks as there are.
    """
    if any(case.clock == "sleeping" for case in cases):
        _wake_first()
    with contextlib.ExitStack() as ports:
        for case in cases:
            start_rank()  # a world of its own for every run: an engine makes process groups and never gives them back
            with time_of(case) as clock:
                send(Replay(case, clock).run())
            _leave(ports)


def _wake_first() -> None:
    """Ranks sleep nearly all the time; where allowed, they wake up before whatever else computes here."""
    with contextlib.suppress(PermissionError):
        if hasattr(os, "sched_setscheduler"):
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        else:
            os.setpriority(os.PRIO_PROCESS, 0, -15)


def _leave(ports: contextlib.ExitStack) -> None:
    """End this world; the next one meets at another port, since late ranks could still reach the old one.

    Args:
        ports: keeps those that the first rank has reserved.
    """
    import deepspeed.comm.comm as deepspeed_comm

    port = [ports.enter_context(reserved_port()) if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(port, src=0)
    os.environ["MASTER_PORT"] = str(port[0])
    dist.barrier()
    dist.destroy_process_group()
    deepspeed_comm.cdb = None
    # Every group has threads that look for messages a hundred times a second until nobody knows the group any more.
    gc.collect()


def run_cases(cases: Sequence[Case]) -> Iterator[Result]:
    """Replay cases, one launch for every number of ranks; yields them as they finish.

    Args:
        cases: runs.

    Raises:
        ValueError: if a trace does not fit, before any rank starts.
        RankError: if a rank fails.
    """
    for case in cases:
        case.load_trace()  # what does not fit is refused before any rank starts
    launches: dict[Any, list[Case]] = {}
    for number, case in enumerate(cases):  # who has left is missing in the next run
        launches.setdefault((case.num_stages, case.replicas, number if case.leaves else ""), []).append(case)
    for (num_stages, replicas, _), here in launches.items():
        yield from run_forked(replay_all, num_stages * replicas, here)


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
        f"overhead {result.overhead():.2%} | {len(result.moves)} moves | {result.kind} in {result.machine_s:.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", nargs="+", default=["model:freezing:24"])
    parser.add_argument("--stages", type=int, nargs="+", default=[2])
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--micro-batches-per-stage", type=int, default=2)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--layer-ms", type=float, default=30.0)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--speeds", type=float, nargs="+", default=[], help="relative speed of every stage or worker")
    parser.add_argument("--link-ms", type=float, default=0.0, help="mean delay of a message")
    parser.add_argument("--link-spread", type=float, default=0.0, help="relative spread of the delays")
    parser.add_argument("--jitter", type=float, default=0.0, help="relative, of every layer and micro-batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--leave", type=_leave_at, nargs="+", default=[], metavar="BATCH:STAGES",
        help="after BATCH only STAGES are left",
    )
    parser.add_argument("--clock", choices=CLOCKS, default=CLOCKS[0])
    parser.add_argument("--costs", choices=COSTS, default=COSTS[0])
    parser.add_argument("--methods", nargs="+", default=["all"], help="'all' or labels: " + "; ".join(METHODS))
    parser.add_argument("--save", type=Path, help="file of JSON lines for the results")
    options = parser.parse_args()
    methods = list(METHODS) if options.methods == ["all"] else options.methods
    try:
        cases = [
            Case(
                trace, method, stages, options.micro_batches_per_stage * stages, options.batches, options.layer_ms,
                options.every, options.speeds, options.link_ms, options.link_spread, options.seed, options.replicas,
                options.jitter, options.leave, options.clock, options.costs,
            )
            for trace in options.trace for stages in options.stages for method in methods
        ]
        for case in cases:
            case.load_trace()
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(in_words(installed()), IN_WORDS[options.clock], sep="\n", flush=True)
    for result in run_cases(cases):
        print(describe(result), flush=True)
        if options.save:
            with options.save.open("a") as file:
                file.write(json.dumps(result.as_values()) + "\n")


def _leave_at(text: str) -> tuple[int, int]:
    batch, _, stages = text.partition(":")
    if not (batch.isdigit() and stages.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r}: must be BATCH:STAGES, such as 20:3")
    return int(batch), int(stages)


if __name__ == "__main__":
    main()
