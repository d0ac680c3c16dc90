"""The plan value, the rules of boundaries, and plans made from boundaries."""

import numpy as np
import pytest

from dynpipe_ds.partition import Plan, check_boundaries, plan_from_boundaries


@pytest.mark.parametrize(
    "plan",
    [
        Plan((0, 3, 7), 0.1),
        Plan((0, 0, 7), 1e-300, bottleneck_before=1 / 3, bytes_to_move=12, rounds=4),
        Plan((0, 7), 5.0, bytes_to_move=1),
        Plan((0, 3, 7), 0.0, bottleneck_before=0.0),
    ],
)
def test_text_form_parses_back(plan):
    assert Plan.parse(str(plan)) == plan


def test_text_form_is_short():
    plan = Plan((0, 3, 7), 0.25, bottleneck_before=0.5, bytes_to_move=64)
    assert str(plan) == "0|3|7 bottleneck=0.25 before=0.5 bytes=64"


@pytest.mark.parametrize("text", ["", "0|3", "0 bottleneck=1", "0|3 bottleneck=1 extra=2"])
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="not a plan: .* a plan reads"):
        Plan.parse(text)


def test_predicted_gain():
    assert Plan((0, 1), 3.0, bottleneck_before=4.0).predicted_gain == 0.25
    assert Plan((0, 1), 3.0).predicted_gain == 0
    assert Plan((0, 1), 0.0, bottleneck_before=0.0).predicted_gain == 0


def test_boundaries_become_plain_ints():
    checked = check_boundaries(np.array([0, 2, 5]), num_layers=5, num_stages=2)
    assert checked == (0, 2, 5)
    assert {type(cut) for cut in checked} == {int}


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 5], "have 2 entries; 2 stages need 3"),
        ([1, 2, 5], "run from 1 to 5; they must start at 0"),
        ([0, 2, 4], "run from 0 to 4; .* number of layers, 5"),
        ([0, 5, 5], r"leave stage 1 empty \(5 to 5\)"),
        ([0, 6, 5], "fall from 6 to 5 at stage 1; they must increase"),
        ([0, 3, 5], "cut at 3, between layers 2 and 3; that cut is pinned"),
        ([0, 2.5, 5], "must be a sequence of integers"),
        (None, "must be a sequence of integers"),
    ],
)
def test_broken_rules(boundaries, message):
    with pytest.raises(ValueError, match=message):
        check_boundaries(boundaries, num_layers=5, num_stages=2, pinned=[3])


def test_empty_stages_where_allowed():
    assert check_boundaries([0, 5, 5], num_layers=5, num_stages=2, allow_empty=True) == (0, 5, 5)


def test_plan_from_boundaries():
    plan = plan_from_boundaries(
        [0, 1, 4],
        [4.0, 1.0, 1.0, 1.0],
        current=[0, 2, 4],
        layer_bytes=[10, 20, 30, 40],
        speeds=[1.0, 0.5],
    )
    assert plan == Plan((0, 1, 4), 6.0, bottleneck_before=5.0, bytes_to_move=20)


def test_plan_from_broken_boundaries():
    with pytest.raises(ValueError, match="must start at 0 and end at the number of layers, 2"):
        plan_from_boundaries([0, 1, 3], [1.0, 1.0])
    with pytest.raises(ValueError, match="have 1 entries; one stage needs two"):
        plan_from_boundaries([0], [1.0, 1.0])
