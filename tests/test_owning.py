"""Marks of parameters that one replica owns."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dynpipe_ds import Replica, building_replica, own_by_replica
from dynpipe_ds.owning import building, inherit, is_owned, owned_names, owner_of


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_replicas_have_all_rows_in_order(count: int) -> None:
    rows = [row for index in range(count) for row in Replica(index, count).rows(12)]
    assert rows == list(range(12))


@pytest.mark.parametrize(("count", "num_rows"), [(5, 12), (4, 2), (2, 0)])
def test_rows_that_can_not_be_cut_evenly_are_refused(count: int, num_rows: int) -> None:
    with pytest.raises(ValueError, match=f"num_rows={num_rows} over {count} replicas.*take a multiple"):
        Replica(0, count).rows(num_rows)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_a_replica_that_can_not_be_is_refused(index: int, count: int) -> None:
    with pytest.raises(ValueError, match="0 <= index < count"):
        Replica(index, count)


def test_a_layer_that_is_built_knows_its_replica() -> None:
    assert building_replica() == Replica(0, 1)
    with building(Replica(1, 3)):
        assert building_replica() == Replica(1, 3)
        with building(Replica(0, 2)):
            assert building_replica() == Replica(0, 2)
        assert building_replica() == Replica(1, 3)
    assert building_replica() == Replica(0, 1)


def test_a_mark_stays_with_its_parameter() -> None:
    layer = nn.Linear(2, 2)
    own_by_replica(layer.weight, Replica(1, 2))
    assert owner_of(layer.weight) == Replica(1, 2) and owner_of(layer.bias) is None
    assert owned_names(nn.Sequential(layer)) == ("0.weight",)
    layer.to(torch.bfloat16)
    assert is_owned(layer.weight)
    assert vars(layer.weight)["owned_by_replica"] == (1, 2), "plain numbers, which travel"


def test_what_takes_its_place_inherits_it() -> None:
    old, new, other = (nn.Parameter(torch.ones(2)) for _ in range(3))
    own_by_replica(old, Replica(1, 2))
    inherit(old, new)
    assert owner_of(new) == Replica(1, 2)
    inherit(other, copy.deepcopy(other))
    own_by_replica(other, Replica(0, 2))
    with pytest.raises(ValueError, match="and the old one is .*; leave the new one unmarked"):
        inherit(old, other)
    with pytest.raises(ValueError, match="the old one is not owned; leave the new one unmarked"):
        inherit(nn.Parameter(torch.ones(2)), other)


def test_a_parameter_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="no dimension"):
        own_by_replica(nn.Parameter(torch.ones(())), Replica())
