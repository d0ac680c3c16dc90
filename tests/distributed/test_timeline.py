"""``engine.timeline()``: what ranks did in a batch, by a clock that layers tell, and by the machine's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest.mock import patch

from dynpipe_ds.reporting import chrome_trace
from dynpipe_ds.schedule import Op
from dynpipe_ds.simulation import Interval, Workload, simulate
from tests.distributed.configs import ADAMW, BY_HAND
from tests.distributed.models import Run, make_engine, train
from tests.distributed.ranks import run_ranks
from tests.distributed.sleeping import napping, told_time
from tests.distributed.splitting import delayed
from tests.distributed.test_profiler import engine_of
from tests.distributed.test_profiler import train as nap

NAPS = [(0.25, 0.5), (0.5, 0.5), (0.25, 1.0), (0.75, 0.25)]
BUSY = ("forward", "backward", "weight")


def told(_rank: int) -> tuple[Any, ...]:
    """Two cuts; then the first stage is frozen, which gets no gradients any more."""
    with told_time():
        engine = engine_of(napping(NAPS), [0, 2, 4, 6], {"dynamic_pipeline": {**BY_HAND, "schedule": "1f1b"}})
        before = engine.timeline()
        nap(engine, 2)
        first = engine.timeline()
        engine.repartition((0, 3, 4, 6))
        nap(engine, 1)
        second = engine.timeline()
        for index, layer in engine.local_layers().items():
            layer.requires_grad_(index > 2)
        nap(engine, 1)
        return before, first, second, engine.timeline(), engine.last_batch_profile


def busy(timeline: tuple[Interval, ...]) -> list[Interval]:
    return sorted(i for i in timeline if i.kind in BUSY)


def test_the_timeline_is_the_simulators_where_no_other_time_passes() -> None:
    """Computations to the last bit, and the messages between them; the same on every rank."""
    ranks = run_ranks(told, 3)
    assert ranks[0][:4] == ranks[1][:4] == ranks[2][:4]
    before, first, second, frozen, profile = ranks[0]
    assert before == (), "nothing was profiled yet"
    for timeline, cut, layers in ((first, (0, 2, 4, 6), 4), (second, (0, 3, 4, 6), 4), (frozen, (0, 3, 4, 6), 2)):
        backward_s = [0.0] * (4 - layers) + [b for _, b in NAPS[4 - layers :]]
        by_layer = [(0.0, 0.0), *((f, b) for (f, _), b in zip(NAPS, backward_s, strict=True)), (0.0, 0.0)]
        stages = [[sum(times) for times in zip(*by_layer[a:b], strict=True)] for a, b in pairwise(cut)]
        num_frozen = int(stages[0][1] == 0)
        workload = Workload(
            [f for f, _ in stages], [b for _, b in stages], profile.num_micro_batches, frozen_boundaries=num_frozen
        )
        simulated = simulate(workload, timeline=True).timeline
        assert busy(timeline) == busy(simulated)
        sent = [sorted((i.stage, i.payload, i.micro_batch, i.start_s) for i in of if i.kind == "message")
                for of in (timeline, simulated)]  # fmt: skip
        assert sent[0] == sent[1]


def real(_rank: int, run: Run) -> tuple[Any, ...]:
    engine = make_engine(run)
    pipeline = engine.dynamic.pipeline
    with patch.object(pipeline, "run_order"):  # else it is chosen anew before every batch
        pipeline.order_for = delayed(2)
        train(engine, run)
    return engine.timeline()


def test_a_split_order_on_the_machines_clock() -> None:
    """One thing at a time on each stage, in its order; nothing is computed before what it needs was sent."""
    run = Run(3, 3, config=ADAMW, micro_batches=5)
    timeline, *others = run_ranks(real, 3, run)
    assert others == [timeline] * 2
    order = delayed(2)(5, 3)
    ops = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_WEIGHT: "weight"}
    for stage in range(3):
        own = [i for i in timeline if i.stage == stage and i.kind != "message"]
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(own))
        computed = [(ops[op], m) for op, m in order.stages[stage] if op in ops]
        assert [i[1:3] for i in own if i.kind in BUSY] == computed
        assert own[-1].kind == "step"
    computed_at = {i[:3]: i for i in timeline if i.kind in BUSY}
    messages = [i for i in timeline if i.kind == "message"]
    assert len(messages) == 2 * 2 * 5
    for message in messages:
        kind, step = ("forward", 1) if message.payload == "activation" else ("backward", -1)
        receiver = message.stage + step
        needs = computed_at[receiver, kind, message.micro_batch]
        assert computed_at[message.stage, kind, message.micro_batch].end_s <= message.start_s + 1e-9
        assert message.start_s <= message.end_s + 1e-9 <= needs.start_s + 2e-9
    assert {e["ph"] for e in chrome_trace(timeline)["traceEvents"]} == {"M", "X", "b", "e", "s", "f"}
