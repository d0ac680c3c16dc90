"""Every form of ``partition_method``, and how each becomes boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from dynpipe_ds import PipelineProfile, register_partitioner
from dynpipe_ds.decide.methods import PartitionMethod, profile_from_parameters
from dynpipe_ds.measure.profile import LayerProfile
from dynpipe_ds.partition import partitioner_names, registry


def profile(seconds: Sequence[float], parameters: Sequence[int] | None = None) -> PipelineProfile:
    counts = parameters or [10] * len(seconds)
    layers = tuple(
        LayerProfile(
            name=f"L{i}", forward_s=s / 3, backward_s=2 * s / 3, num_parameters=n, parameter_bytes=4 * n,
            gradient_bytes=4 * n, optimizer_state_bytes=8 * n, activation_bytes=0,
        )
        for i, (s, n) in enumerate(zip(seconds, counts, strict=True))
    )
    return PipelineProfile(batch=0, boundaries=(), num_micro_batches=4, layers=layers, stages=())


def halves(_profile: PipelineProfile, num_stages: int) -> list[int]:
    return [0, 3, 6] if num_stages == 2 else [0]


class Chooser:
    def __call__(self, _profile: PipelineProfile, _num_stages: int) -> list[int]:
        return [0, 2, 6]


# -- what is understood -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["uniform", "Uniform", "parameters", "type:Block", "TYPE:block|head"])
def test_names_that_deepspeed_carries_out(name: str) -> None:
    method = PartitionMethod.parse(name)
    assert method.is_deepspeed and method.is_start_only and method.deepspeed_name == name
    assert str(method) == name


@pytest.mark.parametrize("name", ["profile", "PROFILE"])
def test_profile_is_optimal_by_time(name: str) -> None:
    assert PartitionMethod.parse(name) == PartitionMethod.parse("optimal:time")


@pytest.mark.parametrize("cost", ["time", "parameters"])
@pytest.mark.parametrize("partitioner", ["uniform", "balanced", "optimal", "diffusion", "simulated"])
def test_partitioner_and_cost(partitioner: str, cost: str) -> None:
    method = PartitionMethod.parse(f"{partitioner}:{cost}")
    assert (method.partitioner, method.cost) == (partitioner, cost)
    assert not method.is_deepspeed and not method.is_start_only
    assert str(method) == f"{partitioner}:{cost}"


@pytest.mark.parametrize(
    "given", [[0, 2, 6], (0, 2, 6), np.array([0, 2, 6]), torch.tensor([0, 2, 6]), [np.int64(0), 2, 6]],
    ids=["list", "tuple", "array", "tensor", "numpy ints"],
)
def test_explicit_boundaries(given: Any) -> None:
    method = PartitionMethod.parse(given)
    assert method.boundaries == (0, 2, 6) and all(type(b) is int for b in method.boundaries)
    assert method.is_start_only and not method.is_deepspeed and not method.needs_parameters
    assert str(method) == "[0, 2, 6]"


@pytest.mark.parametrize(
    ("given", "shown"), [(halves, "halves"), (Chooser(), "Chooser"), (partial(halves), "halves")],
    ids=["function", "object", "partial"],
)
def test_callables(given: Any, shown: str) -> None:
    method = PartitionMethod.parse(given)
    assert method.function is given and not method.is_start_only and not method.is_deepspeed
    assert shown in str(method)
    assert method.plan(profile([1] * 6), 2).boundaries in ((0, 3, 6), (0, 2, 6))


def test_a_method_is_a_method() -> None:
    method = PartitionMethod.parse("optimal:time")
    assert PartitionMethod.parse(method) is method


def test_a_registered_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_partitioners", dict(registry._partitioners))

    @register_partitioner("last_light")
    def last_light(costs: Sequence[float], num_stages: int, **_: Any) -> list[int]:
        return [*range(num_stages), len(costs)]

    plan = PartitionMethod.parse("last_light:time").plan(profile([1, 2, 3, 4]), 3)
    assert plan.boundaries == (0, 1, 2, 4) and plan.bottleneck == 7
    with pytest.raises(ValueError, match="last_light"):
        PartitionMethod.parse("nothing:time")


@pytest.mark.parametrize("bad", ["optimal", "optimal:flops", "fancy:time", "", "balanced:", ":time", 7, None])
def test_anything_else_is_refused_with_the_choices(bad: Any) -> None:
    with pytest.raises(ValueError) as caught:
        PartitionMethod.parse(bad)
    message = str(caught.value)
    assert repr(bad) in message
    for choice in ("uniform", "parameters", "type:<regex>", "'profile'", *partitioner_names(), "time", "callable"):
        assert choice in message


# -- what becomes of it -----------------------------------------------------------------------


def test_costs() -> None:
    uneven = profile([5, 1, 1, 1], parameters=[1, 1, 1, 9])
    assert PartitionMethod.parse("optimal:time").plan(uneven, 2).boundaries == (0, 1, 4)
    assert PartitionMethod.parse("optimal:parameters").plan(uneven, 2).boundaries == (0, 3, 4)
    assert PartitionMethod.parse("uniform:time").plan(uneven, 2).boundaries == (0, 2, 4)


def test_without_times_parameters_stand_in_and_without_those_layers_count_alike() -> None:
    names = ["a", "b", "c", "d"]
    unmeasured = profile_from_parameters([1, 1, 1, 9], names=names, num_stages=2)
    assert [layer.name for layer in unmeasured.layers] == names
    assert PartitionMethod.parse("optimal:time").plan(unmeasured, 2).boundaries == (0, 3, 4)
    functions = profile_from_parameters([0, 0, 0, 0], names=names, num_stages=2)
    assert PartitionMethod.parse("optimal:time").plan(functions, 2).boundaries == (0, 2, 4)


def test_a_callable_gets_profile_and_stages() -> None:
    seen: list[Any] = []

    def choose(given: PipelineProfile, num_stages: int) -> np.ndarray[Any, Any]:
        seen.append((given, num_stages))
        return np.array([0, 1, 4])

    given = profile([1, 2, 3, 4])
    plan = PartitionMethod.parse(choose).plan(given, 2, current=(0, 2, 4))
    assert seen == [(given, 2)]
    assert plan.boundaries == (0, 1, 4) and all(type(b) is int for b in plan.boundaries)
    assert (plan.bottleneck, plan.bottleneck_before) == (9, 7)
    assert plan.bytes_to_move == 40 + 80, "a moved layer's weights and optimizer state; gradients stay"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([0, 4], r"\(0, 4\) have 2 entries; 2 stages need 3"),
        ([0, 4, 4], r"\(0, 4, 4\) leave stage 1 empty"),
        ([0, 5, 4], r"\(0, 5, 4\) fall from 5 to 4"),
        ([1, 2, 4], r"\(1, 2, 4\) run from 1 to 4"),
        ([0, 3, 4], r"\(0, 3, 4\) cut at 3, between layers 2 and 3"),
        ([0, 2.5, 4], r"2\.5"),
        (None, r"None"),
    ],
)  # fmt: skip
def test_bad_boundaries_are_named_with_the_rule(answer: Any, message: str) -> None:
    given = profile([1, 1, 1, 1])
    with pytest.raises(ValueError, match=message):
        PartitionMethod.parse(lambda *_: answer).plan(given, 2, pinned=[3])
    if isinstance(answer, list) and 2.5 not in answer:
        with pytest.raises(ValueError, match=message):
            PartitionMethod.parse(answer).plan(given, 2, pinned=[3])


def test_empty_stages_where_allowed() -> None:
    given = profile([1, 1, 1, 1])
    assert PartitionMethod.parse([0, 4, 4]).plan(given, 2, allow_empty=True).boundaries == (0, 4, 4)
