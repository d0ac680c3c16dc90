"""The paper's load equations, and the same states as they cost."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.paper.published import INTERVALS
from benchmarks.replay.case import load_trace
from benchmarks.traces.blocks import BLOCK_FORWARD_S, operation_shares
from benchmarks.traces.equations import EQUATIONS, ITERATIONS, sparsity_at
from benchmarks.traces.trace import Trace, TraceBatch

SCENARIOS = tuple(INTERVALS)


def blocks(moment: TraceBatch) -> list[float]:
    """Forwards of the blocks, of a dense one."""
    return [seconds / BLOCK_FORWARD_S for seconds in moment.forward_s[1:-1]]


def last(name: str, depth: int = 24) -> TraceBatch:
    """The end of a run."""
    return EQUATIONS[name](depth).batches[-1]


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("depth", [24, 56])
def test_runs_have_the_papers_length_and_begin_dense_or_uneven(name: str, depth: int) -> None:
    trace = load_trace(f"model:{name}:{depth}")
    assert trace.num_batches == ITERATIONS and len(trace.layers) == depth + 2
    assert trace == EQUATIONS[name](depth), "drawn anew, but not from its seed"
    assert name == "moe_cost" or blocks(trace.batches[0]) == [1.0] * depth
    assert len(load_trace(f"model:{name}:{depth}:halves").layers) > depth + 2


def test_sparsity_steps_are_the_papers() -> None:
    steps = [round(100 * sparsity_at(iteration), 1) for iteration in (3000, 4000, 5000, 6000, 7000)]
    assert steps == [0.0, 52.0, 78.8, 88.6, 90.0]
    trace = EQUATIONS["pruning_equation"](24)
    assert [batch.batch for batch in trace.batches] == [0, 4000, 5000, 6000, 7000]
    for batch in trace.batches:
        kept = sum(batch.parameter_bytes[1:-1]) / sum(trace.batches[0].parameter_bytes[1:-1])
        assert kept == pytest.approx(1 - sparsity_at(batch.batch) if batch.batch else 1.0, abs=1e-4)


def test_pruned_loads_are_linear_in_density_and_costs_are_not() -> None:
    counted, costs = last("pruning_equation"), last("pruning_cost")
    assert counted.parameter_bytes == costs.parameter_bytes
    dense_bytes = EQUATIONS["pruning_cost"](24).batches[0].parameter_bytes[1]
    densities = [b / dense_bytes for b in counted.parameter_bytes[1:-1]]
    assert blocks(counted) == pytest.approx(densities, abs=1e-3)
    scores = operation_shares()[2]
    assert blocks(costs) == pytest.approx([scores + (1 - scores) * min(1, d / 0.29) for d in densities], abs=1e-3)


def test_frozen_layers_count_as_none_in_the_paper_and_cost_a_forward() -> None:
    counted, costs = last("freezing_equation"), last("freezing_cost")
    assert counted.frozen_layers == costs.frozen_layers == 1 + round(24 * 7 / 12)
    assert blocks(counted)[:14] == [0.0] * 14 and blocks(costs)[:14] == [1.0] * 14
    assert counted.backward_s == costs.backward_s
    trace = EQUATIONS["freezing_cost"](24)
    assert all(batch.batch % INTERVALS["freezing"][0] == 0 for batch in trace.batches)


def test_sparse_attention_scales_the_layer_in_the_paper_and_its_scores_in_cost() -> None:
    counted, costs = blocks(last("sparse_attention_equation")), blocks(last("sparse_attention_cost"))
    scores = operation_shares()[2]
    assert scores == pytest.approx(0.25)
    assert costs == pytest.approx([1 - scores + scores * min(1, 1.5 * share) for share in counted], abs=1e-4)
    assert fmean(counted) < 0.6 and min(costs) >= 0.75


def test_tokens_that_are_left_count() -> None:
    counted, costs = blocks(last("early_exit_equation")), blocks(last("early_exit_cost"))
    assert counted[0] == 1.0 and counted == sorted(counted, reverse=True) and counted[-1] < 0.05
    assert costs[-1] == pytest.approx(counted[-1] + 0.02)
    counted, costs = blocks(last("mod_equation")), blocks(last("mod_cost"))
    assert counted[::2] == costs[::2] == [1.0] * 12
    assert costs[1::2] == pytest.approx([share + 0.02 for share in counted[1::2]])


def test_the_papers_sum_over_experts_knows_no_imbalance() -> None:
    assert {tuple(blocks(batch)) for batch in EQUATIONS["moe_equation"](32).batches} == {(1.0,) * 32}
    costs = [blocks(batch) for batch in EQUATIONS["moe_cost"](32).batches]
    assert len({tuple(each) for each in costs}) == 100 and max(map(max, costs)) > 1.5


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_both_countings_are_of_the_same_states(scenario: str) -> None:
    counted, costs = (EQUATIONS[f"{scenario}_{kind}"](32) for kind in ("equation", "cost"))
    assert scenario == "moe" or _when(counted) == _when(costs)
    for one, other in zip(counted.batches, costs.batches, strict=False):
        assert one.frozen_layers == other.frozen_layers and one.parameter_bytes == other.parameter_bytes


def _when(trace: Trace) -> list[int]:
    return [batch.batch for batch in trace.batches]
