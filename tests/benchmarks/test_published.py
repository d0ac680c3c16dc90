"""The paper's figures."""

from __future__ import annotations

import pytest

from benchmarks.paper import experiments, published


@pytest.mark.parametrize("scenario", experiments.SCENARIOS)
def test_every_scenario_has_every_figure(scenario: str) -> None:
    for blocks in published.DEPTHS:
        for cell in (published.speedup(scenario, blocks), published.overhead(scenario, blocks)):
            assert published.UNKNOWN not in cell
    assert published.UNKNOWN not in published.idleness(scenario) and published.interval(scenario) >= 1


def test_a_factor_names_what_it_is_over() -> None:
    assert published.speedup("early_exit", 48) == "4.83x over no early exit"
    assert published.speedup("sparse_attention", 40) == "4.02x over dense attention"
    assert published.speedup("freezing", 24) == "1.36x over Egeria"
    assert published.speedup("moe").endswith("1.18 to 1.21x over Tutel")
    assert published.speedup("pruning", 56) == "2.32 to 2.84x over static Megatron-LM, DeepSpeed", "no label for 56"
    over_static = {name for name in experiments.SCENARIOS if published.is_over_static(name)}
    assert over_static == {"pruning", "moe", "mod"}


def test_overheads_go_by_depth() -> None:
    assert published.overhead("sparse_attention", 48) == "13%"
    assert published.overhead("sparse_attention", 56) == "2% to 13% (24 to 48 layers)"
    assert published.overhead("pruning", 56) == "<0.1%"
    assert published.iterations("diffusion:time", 48) == "4"
    assert published.iterations("partition:parameters", 24) == "61"
    assert published.iterations("optimal:time", 24) == published.iterations("diffusion:time", 8) == "not given"


def test_what_is_not_known_is_not_invented() -> None:
    assert published.speedup("walking") == published.overhead("walking") == published.idleness("walking") == "n/a"


def test_the_table_of_one_node_agrees_with_itself() -> None:
    for size, row in published.ONE_NODE.items():
        best = max(row.diffusion, row.partition) / row.megatron
        assert best == pytest.approx(row.speedup, abs=0.012), size
    assert not set(published.OUT_OF_MEMORY) & set(published.ONE_NODE)


def test_average_gpus_follow_from_when_they_shrink() -> None:
    """But for 24 layers, which is named among the contradictions."""
    for blocks, starts in published.SHRINKS_AT.items():
        counts = zip(starts, [*starts[1:], 10_001], (8, 6, 4, 2), strict=False)
        mean = sum((end - begin) * count for begin, end, count in counts) / 10_000
        assert mean == pytest.approx(published.AVERAGE_GPUS[blocks], abs=0.11 if blocks == 24 else 0.05)
    assert any("5.50" in line for line in published.CONTRADICTIONS)
