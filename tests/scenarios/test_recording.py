"""What a run records for its report."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

from dynpipe_ds import LayerProfile, PipelineProfile, RebalanceEvent, StageProfile
from dynpipe_ds.schedule import Order, order_of, split_at_once
from scenarios.recording import Measurements, Recording


def profile(batch: int, boundaries: tuple[int, ...]) -> PipelineProfile:
    """Two layers; layer i takes (batch + i) seconds forward and twice that backward."""
    layers = [LayerProfile(f"layer {i}", batch + i, 2.0 * (batch + i), 1, 4, 4, 8, 16) for i in range(2)]
    return PipelineProfile(batch, boundaries, 3, tuple(layers), ())


def test_events() -> None:
    """They survive JSON; what earlier versions kept besides is left out."""
    values = Recording()
    values.add_rebalance(RebalanceEvent(2, (0, 1, 2), (0, 2, 2), 0.25, 1024, 0.1, 0.2))
    assert values.rebalances[0]["predicted_gain"] == 0.25 and values.rebalances[0]["after"] == [0, 2, 2]
    assert Recording(**json.loads(json.dumps(asdict(values)))) == values
    assert Recording().rebalances == [], "runs share nothing"
    assert Recording.from_values({**asdict(values), "first_batches": [0], "names": ["a"]}) == values


def test_orders_and_what_was_predicted_of_them() -> None:
    """An entry where the partition or the kind of order changes; trials that split under 1F1B are no sample of it."""
    values, usual = Recording(), order_of("1f1b", 3, 2)
    split, planned = split_at_once(3, 2, 1), Order.parse(
        "F0 SA0 F1 SA1 F2 SA2 RG0 B0 RG1 B1 RG2 B2 | RA0 F0 RA1 F1 B0 SG0 B1 SG1 W0 RA2 F2 B2 SG2 W1 W2"
    )
    ran = [*[(usual, 1)] * 12, (split, 1), (planned, 1), (planned, 0), (usual, 0)]
    for batch, (order, cut) in enumerate(ran):
        values.add_order(batch, (0, cut, 2), order)
        seconds = profile(batch, (0, cut, 2))
        values.add_prediction(replace(seconds, stages=(StageProfile(7.0, 1.0, 2.0, 50.0, 60.0, 0),) * 2), order)
    assert [(phase["first_batch"], phase["order"], phase["boundaries"]) for phase in values.orders] == [
        (0, "1F1B", [0, 1, 2]), (12, "planned", [0, 1, 2]), (14, "planned", [0, 0, 2]), (15, "1F1B", [0, 0, 2])
    ]  # fmt: skip
    assert [len(phase["predicted_s"]) for phase in values.orders] == [8, 2, 1, 1]
    assert values.orders[0]["predicted_s"][0] == 3 * 3.0 and values.orders[0]["measured_s"] == [10.0] * 8
    layers = (replace(seconds.layers[0], weight_s=1.0), seconds.layers[1])
    values.add_prediction(replace(seconds, layers=layers), usual)
    assert len(values.orders[-1]["predicted_s"]) == 1
    assert Recording(**json.loads(json.dumps(asdict(values)))) == values


def test_measurements_of_an_earlier_version_are_continued() -> None:
    """They had no windows: what was timed then does not count, what comes does."""
    measured = Measurements(losses=[2.0], windows=[[2, 6, 1.5], [8, 4, 1.0]])
    assert measured.timed_s == 2.5 and Measurements.from_values(asdict(measured)) == measured
    old = {**asdict(measured), "timed_s": 2.5, "timed_batches": 10, "last_tokens_per_s": 3.0}
    del old["windows"]
    assert Measurements.from_values(old) == Measurements(losses=[2.0])
