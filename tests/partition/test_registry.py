"""Partitioners by name, and the checks of what a user's function returns."""

import numpy as np
import pytest

from dynpipe_ds.partition import (
    InfeasiblePartitionError,
    Plan,
    StageMemory,
    diffusion,
    get_partitioner,
    optimal,
    partitioner_names,
    register_partitioner,
    registry,
    run_partitioner,
)


@pytest.fixture(autouse=True)
def unchanged_registry(monkeypatch):
    monkeypatch.setattr(registry, "_partitioners", dict(registry._partitioners))


def test_built_in_names():
    assert partitioner_names() == ("balanced", "diffusion", "optimal", "simulated", "uniform")
    assert get_partitioner("optimal") is optimal


def test_register_by_call_and_by_decorator():
    def mine(costs, num_stages, **options):
        return range(num_stages + 1)

    assert register_partitioner("mine", mine) is mine
    assert get_partitioner("mine") is mine

    @register_partitioner("other")
    def other(costs, num_stages, **options):
        return range(num_stages + 1)

    assert get_partitioner("other") is other
    assert {"mine", "other"} < set(partitioner_names())


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown partitioner 'best'; known: balanced, diff.*opt"):
        get_partitioner("best")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimal", "'optimal' is taken"),
        ("mine:time", "'mine:time' must not be empty or contain ':'"),
        ("", "'' must not be empty"),
    ],
)
def test_refused_names(name, message):
    with pytest.raises(ValueError, match=message):
        register_partitioner(name, optimal)
    with pytest.raises(ValueError, match=message):
        register_partitioner(name)


def test_refuses_what_is_no_function():
    with pytest.raises(TypeError, match="must be a function"):
        register_partitioner("mine", 3)


def returning(boundaries):
    def mine(costs, num_stages, **options):
        return boundaries

    return mine


def test_run_fills_in_the_figures():
    options = {"current": [0, 2, 4], "layer_bytes": [1, 2, 3, 4], "speeds": [1.0, 0.5]}
    expected = Plan((0, 1, 4), 6.0, bottleneck_before=5.0, bytes_to_move=2)
    costs = [4.0, 1.0, 1.0, 1.0]
    for result in ([0, 1, 4], np.array([0, 1, 4]), Plan((0, 1, 4), bottleneck=99.0)):
        plan = run_partitioner(returning(result), costs, 2, **options)
        assert plan == expected
        assert {type(cut) for cut in plan.boundaries} == {int}


def test_run_passes_options_on():
    costs, start = [1.0] * 8, [0, 7, 8]
    plan = run_partitioner(diffusion, costs, 2, current=start, gamma=0.0)
    assert plan == diffusion(costs, 2, current=start, gamma=0.0)
    assert plan.rounds == 1


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 4], "partitioner 'mine': boundaries .* have 2 entries; 2 stages need 3"),
        ([0, 4, 4], "partitioner 'mine': .* leave stage 1 empty"),
        ([0, 2, 4], "partitioner 'mine': .* cut at 2, between layers 1 and 2; that cut is pinned"),
        (None, "partitioner 'mine': .* must be a sequence of integers"),
    ],
)
def test_run_refuses_bad_boundaries(boundaries, message):
    with pytest.raises(ValueError, match=message):
        run_partitioner(returning(boundaries), [1.0] * 4, 2, pinned=[2])


def test_run_allows_empty_stages_if_told():
    plan = run_partitioner(returning([0, 4, 4]), [1.0] * 4, 2, allow_empty=True)
    assert plan.boundaries == (0, 4, 4)


def test_run_checks_memory():
    memory = StageMemory([10] * 4, [0] * 4, 1, 25)
    with pytest.raises(InfeasiblePartitionError, match="mine: stage 0 .* needs 30 bytes"):
        run_partitioner(returning([0, 3, 4]), [1.0] * 4, 2, memory=memory)
