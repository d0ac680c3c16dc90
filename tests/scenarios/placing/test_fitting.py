"""Constants from measured batches: what was put in comes out, whatever disturbs some of them."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from scenarios.moe.placing import Constants, Lanes, LayerModel, Link, Sample, fitted
from scenarios.moe.placing.traffic import as_lanes, count_rows
from tests.scenarios.placing.cases import any_owner, constants, skewed

TRUE = constants(forward_row_s=2e-6, backward_row_s=5e-6, lane_s=3e-5, byte_s=1e-9, message_s=4e-5)


def measured(true: Constants, seed: int, **disturbed: float) -> Sample:
    """What a layer takes by given constants, each part times a factor."""
    lanes, loads = as_lanes(any_owner(4, 8, seed)), skewed(4, 8, seed)
    told = LayerModel(true).predict(lanes, loads)
    rows = count_rows(np.array(lanes.owner), loads.astype(float))
    share = true.forward_share
    forward = rows.computed * true.forward_row_s + rows.lanes * true.lane_s * true.num_micro_batches * share
    backward = rows.computed * true.backward_s + rows.lanes * true.lane_s * true.num_micro_batches * (1 - share)
    factor = {name: disturbed.get(name, 1.0) for name in ("forward", "backward", "all_to_all", "trans", "agg")}
    return Sample(
        lanes=lanes, loads=tuple(map(tuple, loads.tolist())), forward_s=tuple(forward * factor["forward"]),
        backward_s=tuple(backward * factor["backward"]), all_to_all_s=told.all_to_all_s * factor["all_to_all"],
        trans_s=told.trans_s * factor["trans"], agg_s=told.agg_s * factor["agg"],
    )  # fmt: skip


def assert_alike(found: Constants, true: Constants, rel: float) -> None:
    for name in ("forward_row_s", "backward_s", "lane_s", "byte_s", "message_s"):
        assert getattr(found, name) == pytest.approx(getattr(true, name), rel=rel), name


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_what_was_put_in_comes_out(num_micro_batches: int) -> None:
    true = replace(TRUE, num_micro_batches=num_micro_batches)
    found = fitted(constants(num_micro_batches=num_micro_batches), [measured(true, seed) for seed in range(4)])
    assert_alike(found, true, 1e-6)
    assert (found.row_bytes, found.expert_bytes) == (true.row_bytes, true.expert_bytes)


def test_disturbed_batches_count_little() -> None:
    samples = [measured(TRUE, seed) for seed in range(9)]
    samples[2] = measured(TRUE, 2, forward=30.0, trans=20.0)
    samples[5] = measured(TRUE, 5, backward=8.0, all_to_all=50.0, agg=9.0)
    assert_alike(fitted(constants(), samples), TRUE, 1e-3)


def test_noise_is_averaged() -> None:
    draw = np.random.default_rng(0)
    parts = ("forward", "backward", "all_to_all", "trans", "agg")
    samples = [measured(TRUE, seed, **{part: draw.normal(1, 0.03) for part in parts}) for seed in range(24)]
    found = fitted(constants(), samples)
    for seed in range(30, 34):
        lanes, loads = as_lanes(any_owner(4, 8, seed)), skewed(4, 8, seed)
        assert LayerModel(found).seconds(lanes, loads) == pytest.approx(
            LayerModel(TRUE).seconds(lanes, loads), rel=0.05
        )


APART = replace(
    TRUE, trans=Link(byte_s=3e-9, message_s=2e-4, start_s=1e-3),
    agg_link=Link(byte_s=5e-9, message_s=3e-4, start_s=2e-3), sum_s=4e-3, fixed_s=6e-3,
)  # fmt: skip


def sparse(true: Constants, seed: int, noise: float = 0.0) -> Sample:
    """A layer with few copies, or none, one part after the other; each part is told with noise, and so is the whole."""
    draw = np.random.default_rng(seed)
    owner = np.array(Lanes.static(4, 8).owner)
    moved = draw.random(owner.shape) < draw.choice([0.0, 0.05, 0.2, 0.7])
    owner[moved] = draw.integers(0, 4, owner.shape)[moved]
    lanes, loads = as_lanes(owner), skewed(4, 8, seed)
    told = LayerModel(true).predict(lanes, loads)
    rows = count_rows(owner, loads.astype(float))

    def near(seconds: float) -> float:
        return seconds * max(0.0, draw.normal(1.0, noise))

    row_s = (true.forward_row_s, true.forward_share), (true.backward_s, 1 - true.forward_share)
    forward, backward = (
        tuple(map(near, rows.computed * each + rows.lanes * true.lane_s * share)) for each, share in row_s
    )
    parts = [near(seconds) for seconds in (told.all_to_all_s, told.trans_s, told.agg_s)]
    return Sample(
        lanes=lanes, loads=tuple(map(tuple, loads.tolist())), forward_s=forward, backward_s=backward,
        all_to_all_s=parts[0] or None, trans_s=parts[1] or None, agg_s=parts[2] or None,
        layer_s=sum(parts) + max(forward) + max(backward) + near(true.fixed_s),
    )  # fmt: skip


def test_exchanges_weights_sums_and_what_is_fixed_have_constants_of_their_own() -> None:
    found = fitted(constants(), [sparse(APART, seed) for seed in range(16)])
    assert_alike(found, APART, 1e-5)
    for theirs, ours in ((APART.trans, found.trans), (APART.agg_link, found.agg_link)):
        assert asdict(ours) == pytest.approx(asdict(theirs), rel=1e-4)
    assert (found.sum_s, found.fixed_s) == pytest.approx((APART.sum_s, APART.fixed_s), rel=1e-4)


def test_layers_are_predicted_within_5_percent_by_noisy_batches() -> None:
    """Layers that were not measured; a tenth of noise in every part, and some batches ten times slower."""
    samples = [sparse(APART, seed, 0.1) for seed in range(48)]
    for disturbed in (3, 17, 31):
        part = samples[disturbed]
        samples[disturbed] = replace(part, agg_s=10 * (part.agg_s or 0.0), layer_s=10 * (part.layer_s or 0.0))
    found = LayerModel(fitted(constants(), samples), overlapped=False)
    for seed in range(60, 80):
        unseen = sparse(APART, seed)
        assert found.seconds(unseen.lanes, unseen.loads) == pytest.approx(unseen.layer_s, rel=0.05)


def test_one_line_for_all_that_travels_would_not_do() -> None:
    """What the constants of links were before: the exchanges' seconds of a byte for weights and sums as well."""
    found = fitted(constants(), [replace(sparse(APART, seed), trans_s=None, agg_s=None) for seed in range(16)])
    assert found.trans is None and found.agg_link is None
    told = [(LayerModel(found, overlapped=False).seconds(each.lanes, each.loads), each.layer_s)
            for each in (sparse(APART, seed) for seed in range(60, 80))]  # fmt: skip
    assert np.mean([abs(ours - theirs) / theirs for ours, theirs in told if theirs]) > 0.05


@pytest.mark.parametrize("noise", [0.3, 3.0])
def test_no_constant_is_negative_whatever_is_measured(noise: float) -> None:
    for seed in range(20):
        found = fitted(constants(), [sparse(APART, 100 * seed + each, noise) for each in range(1 + seed % 7)])
        links = [value for link in (found.trans_link, found.sums_link) for value in asdict(link).values()]
        rest = [found.forward_row_s, found.backward_s, found.lane_s, found.byte_s, found.message_s, found.sum_s]
        assert min(*links, *rest, found.fixed_s) >= 0


def test_weights_that_always_travel_alike_scale_what_is_known_of_them() -> None:
    """One placement, batch after batch: slower by the bytes', the messages' or the start's fault."""
    lanes, loads = Lanes.parse("2x4 0@1:1"), ((9.0, 1.0, 1.0, 1.0),) * 2
    known = replace(APART, trans=Link(byte_s=1e-9, message_s=1e-4, start_s=1e-3))
    before_s = LayerModel(known).predict(lanes, loads).trans_s
    found = fitted(known, [Sample(lanes=lanes, loads=loads, trans_s=3 * before_s)] * 2)
    assert found.trans is not None
    assert asdict(found.trans) == pytest.approx({"byte_s": 3e-9, "message_s": 3e-4, "start_s": 3e-3})
    assert found.byte_s == known.byte_s and found.agg_link == known.agg_link


def test_renewing_goes_part_of_the_way() -> None:
    samples = [measured(TRUE, seed) for seed in range(4)]
    old = constants(lane_s=1e-5)
    found = fitted(old, samples, weight=0.25)
    assert found.forward_row_s == pytest.approx(0.75 * old.forward_row_s + 0.25 * TRUE.forward_row_s)
    assert found.byte_s == pytest.approx(0.75 * old.byte_s + 0.25 * TRUE.byte_s)


def test_what_nobody_measured_keeps_its_value() -> None:
    sample = measured(TRUE, 0)
    nothing = replace(sample, forward_s=None, backward_s=None, all_to_all_s=None, trans_s=None, agg_s=None)
    for samples in ([], [nothing]):
        assert_alike(fitted(TRUE, samples), TRUE, 1e-12)
    some = fitted(constants(lane_s=1e-6), [replace(nothing, all_to_all_s=1.0)])
    assert some.forward_row_s == constants().forward_row_s and some.byte_s != constants().byte_s


def test_samples_that_cannot_tell_rows_from_lanes_scale_both() -> None:
    """Every lane has as many rows: twice as slow may be the rows' fault or the lanes'."""
    even = Sample(lanes=Lanes.static(2, 2), loads=((10, 10), (10, 10)), forward_s=(60.0, 60.0))
    known = Constants(forward_row_s=1.0, backward_row_s=1.0, row_bytes=1, byte_s=1, expert_bytes=1, lane_s=10.0)
    found = fitted(known, [even, even])  # it was told 20 rows and 2 lanes of 5: 30 s
    assert found.forward_row_s == pytest.approx(2.0)
    assert found.lane_s == pytest.approx(10.0 + 5.0)
    assert found.backward_row_s == 1.0


def test_nothing_becomes_negative() -> None:
    """Ranks with fewer lanes took longer: no seconds of a lane explain that."""
    lanes = Lanes.parse("2x4 1@1:0-1 0@1:1")
    loads = ((100.0, 1.0, 100.0, 1.0), (100.0, 1.0, 100.0, 1.0))
    found = fitted(constants(lane_s=1e-3), [Sample(lanes=lanes, loads=loads, forward_s=(9.0, 1.0))])
    assert found.lane_s >= 0 and found.forward_row_s >= 0


@pytest.mark.parametrize("weight", [0.0, 1.5, -1.0])
def test_a_weight_without_a_meaning(weight: float) -> None:
    with pytest.raises(ValueError, match=f"weight={weight} must be above 0 and at most 1"):
        fitted(TRUE, [], weight=weight)


def test_times_of_other_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="forward_s of 3 ranks for a placement of 4: give one value a rank"):
        fitted(TRUE, [replace(measured(TRUE, 0), forward_s=(1.0, 2.0, 3.0))])
