"""Placements as values, and what takes them."""

from __future__ import annotations

import json
import pickle
import random
from types import SimpleNamespace

import pytest

from dynpipe_ds.checkpoint.manifest import Manifest, OptimizerEntry
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.migration import Move, plan_moves
from dynpipe_ds.migration.migrate import Migration
from dynpipe_ds.partition import Placement, optimal
from dynpipe_ds.simulation import Workload, predicted_batches_s

V_SHAPED = Placement((0, 2, 3, 5, 6), (0, 1, 1, 0))


def test_a_partition() -> None:
    placement = Placement.from_boundaries([0, 2, 2, 5])
    assert placement.is_contiguous and placement.boundaries == (0, 2, 2, 5)
    assert (placement.num_layers, placement.num_stages) == (5, 3)
    assert placement.layer_stages == (0, 0, 2, 2, 2) == tuple(placement.stage_of(layer) for layer in range(5))
    assert [placement.layers_of(stage) for stage in range(3)] == [(0, 1), (), (2, 3, 4)]
    assert placement.by_stage("abcde") == [["a", "b"], [], ["c", "d", "e"]]
    assert str(placement) == "0|2|2|5"


def test_several_chunks_a_stage() -> None:
    assert not V_SHAPED.is_contiguous and (V_SHAPED.num_layers, V_SHAPED.num_stages) == (6, 2)
    assert V_SHAPED.chunks_of(0) == (range(0, 2), range(5, 6)) and V_SHAPED.layers_of(0) == (0, 1, 5)
    assert V_SHAPED.layer_stages == (0, 0, 1, 1, 1, 0) == tuple(V_SHAPED.stage_of(layer) for layer in range(6))
    assert V_SHAPED.by_stage([0, 1, 2, 3, 4, 5]) == [[0, 1, 5], [2, 3, 4]]
    assert str(V_SHAPED) == "0|2|3|5|6 on stages 0, 1, 1, 0"
    with pytest.raises(ValueError, match="placement 0.2.3.5.6 on stages 0, 1, 1, 0: each stage must hold one range"):
        _ = V_SHAPED.boundaries
    assert not Placement((0, 1, 2), (1, 0)).is_contiguous, "in another order than the stages"


def test_every_layer_is_on_one_stage() -> None:
    draw = random.Random(5)
    for _ in range(200):
        num_stages, num_layers = draw.randint(1, 5), draw.randint(0, 9)
        holders = [*range(num_stages), *draw.choices(range(num_stages), k=draw.randint(0, 4))]
        draw.shuffle(holders)
        cuts = [0, *sorted(draw.randint(0, num_layers) for _ in holders[1:]), num_layers]
        placement = Placement(tuple(cuts), tuple(holders))
        held = [placement.layers_of(stage) for stage in range(num_stages)]
        assert sorted(layer for layers in held for layer in layers) == list(range(num_layers))
        assert all(placement.stage_of(layer) == stage for stage, layers in enumerate(held) for layer in layers)
        assert placement.by_stage(range(num_layers)) == [list(layers) for layers in held]
        assert Placement.from_plain(json.loads(json.dumps(placement.plain()))) == placement
        assert pickle.loads(pickle.dumps(placement)) == placement


def test_equal_ones_are_one_key() -> None:
    same = Placement.from_boundaries((0, 2, 5)), Placement((0, 2, 5), (0, 1)), Placement.of([0, 2, 5])
    assert len(set(same)) == 1 and same[0].plain() == [0, 2, 5]
    assert same[0] != Placement.from_boundaries((0, 3, 5))


@pytest.mark.parametrize(
    ("cuts", "holders", "message"),
    [
        ((0, 2, 1), (0, 1), "cuts must rise from 0 to the number of layers"),
        ((1, 2), (0,), "cuts = .1, 2., holders = .0,.: cuts must rise from 0"),
        ((0, 2), (0, 1), "one holder for each range between two cuts"),
        ((0, 1, 2), (0, 2), "must name each stage from 0 to 2; a stage without layers holds an empty chunk"),
        ((0, 1, 2), (0, -1), "must name each stage from 0 to 0"),
        ((0, 1.5), (0,), "must be a sequence of integers"),
    ],
)
def test_refused(cuts: tuple[int, ...], holders: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(cuts, holders)


def test_refused_forms() -> None:
    for boundaries in ((), (0,), (0, 3, 2), (1, 4), (0, 2)):
        with pytest.raises(ValueError, match="must rise from 0 to the number of layers, 4"):
            Placement.from_boundaries(boundaries, num_layers=4)
    with pytest.raises(ValueError, match="is of 6 layers; the model has 4"):
        Placement.of(V_SHAPED, num_layers=4)
    with pytest.raises(ValueError, match="is not a placement: give a list of boundaries, or cuts and holders"):
        Placement.from_plain({"cuts": [0, 1]})
    with pytest.raises(ValueError, match="layer 6: must be between 0 and 5"):
        V_SHAPED.stage_of(6)


def test_moves_between_any_placements() -> None:
    straight = Placement.from_boundaries((0, 3, 6))
    assert plan_moves(straight, V_SHAPED) == (Move(2, 0, 1), Move(5, 1, 0))
    assert plan_moves((0, 3, 6), straight) == ()
    with pytest.raises(ValueError, match="must rise from 0 to the number of layers, 6"):
        plan_moves(straight, (0, 3, 5))


def profile_of(boundaries: tuple[int, ...]) -> PipelineProfile:
    layers = tuple(LayerProfile("l", 1.0 + i, 2.0 + i, 1, 4, 4, 8, i) for i in range(6))
    return PipelineProfile(0, boundaries, 3, layers, ())


def test_profiles_and_simulation() -> None:
    profile = profile_of((0, 2, 6))
    assert profile.placement == Placement.from_boundaries((0, 2, 6))
    assert profile.stage_seconds(V_SHAPED) == [3.0 + 5.0 + 13.0, 7.0 + 9.0 + 11.0]
    plan = optimal(profile.costs(), 2)
    assert plan.placement.boundaries == plan.boundaries
    by_placement = Workload.from_profile(profile, plan.placement)
    by_boundaries = Workload.from_profile(profile, plan.boundaries)
    assert by_placement.forward_s.tolist() == by_boundaries.forward_s.tolist()
    assert by_placement.activation_bytes == by_boundaries.activation_bytes
    assert predicted_batches_s([(profile, plan.placement)]) == predicted_batches_s([(profile, plan.boundaries)])
    for use in (lambda: Workload.from_profile(profile, V_SHAPED), lambda: predicted_batches_s([(profile, V_SHAPED)])):
        with pytest.raises(ValueError, match="each stage must hold one range of layers"):
            use()
    with pytest.raises(ValueError, match="must rise from 0"):
        _ = profile_of(()).placement


def test_migration_refuses_what_can_not_run() -> None:
    """Before anything is packed or sent."""
    engine = SimpleNamespace(
        stage_id=0, optimizer=object(),
        module=SimpleNamespace(placement=Placement.from_boundaries((0, 3, 6)), local_layers=dict),
    )
    with pytest.raises(ValueError, match="use a placement made by Placement.from_boundaries"):
        Migration(engine, V_SHAPED, buffer_bytes=1)
    with pytest.raises(ValueError, match=r"placement 0\|3\|5 is of 5 layers; the model has 6"):
        Migration(engine, Placement.from_boundaries((0, 3, 5)), buffer_bytes=1)


def test_a_checkpoint_tells_its_placement() -> None:
    manifest = Manifest("t", (0, 2, 6), 1, (), OptimizerEntry("none", "", 0), (), (), ())
    assert manifest.placement == Placement.from_boundaries((0, 2, 6)) and manifest.num_stages == 2
    assert Manifest.loads(manifest.dumps()) == manifest
    assert json.loads(manifest.dumps())["partition"] == [0, 2, 6]
