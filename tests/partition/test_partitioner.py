"""What the one wrapper gives every algorithm: arguments, checks, figures, capabilities."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest

from dynpipe_ds.config import check_against_model, parse_config
from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile
from dynpipe_ds.partition import (
    InfeasiblePartitionError,
    StageMemory,
    balanced,
    check_boundaries,
    diffusion,
    get_partitioner,
    optimal,
    plan_from_boundaries,
    register_partitioner,
    registry,
    run_partitioner,
    simulated,
    uniform,
)
from dynpipe_ds.partition.partitioner import capabilities_of
from dynpipe_ds.partition.prepare import prepare

BUILT_IN = (uniform, balanced, optimal, diffusion, simulated)


@pytest.fixture(autouse=True)
def unchanged_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_partitioners", dict(registry._partitioners))


def random_options(draw: random.Random, num_layers: int, num_stages: int) -> dict[str, Any]:
    options: dict[str, Any] = {"allow_empty": draw.random() < 0.3}
    if draw.random() < 0.6:
        options["current"] = [0, *sorted(draw.randint(0, num_layers) for _ in range(num_stages - 1)), num_layers]
    if draw.random() < 0.5:
        options["layer_bytes"] = [draw.choice([0, 1, 1000]) for _ in range(num_layers)]
    if draw.random() < 0.4:
        options["pinned"] = draw.sample(range(1, num_layers), draw.randint(0, 2))
    if draw.random() < 0.4:
        options["speeds"] = [draw.choice([0.5, 1.0, 1.0]) for _ in range(num_stages)]
    if draw.random() < 0.4:
        state = [draw.randint(0, 20) for _ in range(num_layers)]
        options["memory"] = StageMemory(state, [1] * num_layers, 3, 2 * sum(state) // num_stages + num_layers)
    return options


@pytest.mark.parametrize("partitioner", BUILT_IN, ids=lambda fn: fn.__name__)
def test_random_problems_with_ties_keep_all_rules(partitioner: Any) -> None:
    solved = 0
    for seed in range(120):
        draw = random.Random(seed)
        num_layers, num_stages = draw.randint(3, 14), draw.randint(1, 5)
        costs = [draw.choice([0.5, 1.0, 1.0, 3.0]) for _ in range(num_layers)]
        options = random_options(draw, num_layers, num_stages)
        try:
            plan = partitioner(costs, num_stages, **options)
        except InfeasiblePartitionError:
            with pytest.raises(InfeasiblePartitionError):
                run_partitioner(partitioner, costs, num_stages, **options)
            continue
        solved += 1
        check_boundaries(
            plan.boundaries, num_layers=num_layers, num_stages=num_stages, pinned=options.get("pinned", ()),
            allow_empty=options["allow_empty"],
        )
        figures = {name: options.get(name) for name in ("current", "layer_bytes", "speeds")}
        expected = plan_from_boundaries(plan.boundaries, costs, **figures)
        assert plan.bottleneck == expected.bottleneck
        assert (plan.bottleneck_before, plan.bytes_to_move) == (expected.bottleneck_before, expected.bytes_to_move)
        if "memory" in options:
            held = options["memory"].stage_bytes(plan.boundaries)
            assert max(held) <= options["memory"].cap_bytes
        assert run_partitioner(partitioner, costs, num_stages, **options) == plan
    assert solved > 60


@pytest.mark.parametrize("partitioner", BUILT_IN, ids=lambda fn: fn.__name__)
def test_arguments_are_prepared_once(partitioner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return prepare(*args, **kwargs)

    monkeypatch.setattr("dynpipe_ds.partition.partitioner.prepare", counted)
    partitioner([1.0, 2.0, 3.0], 2)
    assert len(calls) == 1
    monkeypatch.setattr("dynpipe_ds.partition.registry.prepare", counted)
    run_partitioner(partitioner, [1.0, 2.0, 3.0], 2)
    assert len(calls) == 2


@pytest.mark.parametrize("partitioner", BUILT_IN, ids=lambda fn: fn.__name__)
def test_all_have_the_shared_arguments_first(partitioner: Any) -> None:
    shared = list(inspect.signature(prepare).parameters)
    assert list(inspect.signature(partitioner).parameters)[: len(shared)] == shared


def test_an_unknown_option_is_refused() -> None:
    for call in (lambda: optimal([1.0, 1.0], 2, gama=0.0), lambda: run_partitioner(optimal, [1.0, 1.0], 2, gama=0.0)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'gama'"):
            call()


def test_options_that_only_some_want_may_be_offered_to_all() -> None:
    layer = LayerProfile("l", 1.0, 2.0, 1, 4, 4, 8, 1)
    profile = PipelineProfile(0, (0, 4), 8, (layer,) * 4, ())
    for partitioner in BUILT_IN:
        plan = run_partitioner(partitioner, profile.costs(), 2, profile=profile, activation_link_s=0.1)
        assert plan.boundaries == (0, 2, 4)


def test_a_function_gets_the_options_that_it_names() -> None:
    @register_partitioner("by_pins")
    def by_pins(costs, num_stages, pinned):  # type: ignore[no-untyped-def]
        return [0, 3 if 2 in pinned else 2, len(costs)]

    plan = run_partitioner(get_partitioner("by_pins"), [1.0] * 4, 2, pinned=[2], current=[0, 1, 4])
    assert plan.boundaries == (0, 3, 4) and plan.bottleneck_before == 3.0
    can = capabilities_of(by_pins)
    assert can.takes("pinned") and not (can.memory_caps or can.speeds or can.takes("allow_empty"))
    with pytest.raises(ValueError, match="cut at 3, .* is pinned.* needs a parameter pinned and allow_empty"):
        run_partitioner(lambda costs, num_stages: [0, 3, 4], [1.0] * 4, 2, pinned=[3])


def section(**keys: Any) -> Any:
    return parse_config({"dynamic_pipeline": {"enabled": True, **keys}})


def test_settings_that_a_partitioner_can_not_honour_are_refused() -> None:
    def thirds(costs, num_stages, *, memory):  # type: ignore[no-untyped-def]
        return [0, 1, 2, 3]

    register_partitioner("thirds", thirds)
    section(partitioner="thirds", memory_cap_bytes=100)
    with pytest.raises(ValueError, match="stage_speeds = .* partitioner = 'thirds': this partitioner can't honour it"):
        section(partitioner="thirds", stage_speeds=[1.0, 0.5, 1.0])
    with pytest.raises(ValueError, match="memory_cap_bytes = 100, partition_method = 'uniform'"):
        check_against_model(section(memory_cap_bytes=100), num_layers=3, num_stages=3, partitioner="uniform")
    section(partitioner="registered_later", stage_speeds=[1.0, 0.5])
