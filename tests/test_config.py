"""The "dynamic_pipeline" section: defaults, every problem in one message, contradictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from dynpipe_ds.config import (
    SECTION,
    DynamicPipelineConfig,
    check_against_model,
    parse_config,
)
from dynpipe_ds.sections import parse_bytes

DOCUMENT = Path(__file__).parent.parent / "docs" / "configuration.md"


def problems(**section: Any) -> str:
    """The message about a section that has something wrong with it."""
    with pytest.raises(ValueError) as caught:
        parse_config({SECTION: section})
    return str(caught.value)


def model_problems(section: dict[str, Any], **model: Any) -> str:
    """The message about a valid section that does not fit the model."""
    config = parse_config({SECTION: {"enabled": True, **section}})
    with pytest.raises(ValueError) as caught:
        check_against_model(config, **model)
    return str(caught.value)


def test_missing_section_is_disabled() -> None:
    assert parse_config({"train_batch_size": 8}) == DynamicPipelineConfig()
    assert not parse_config({}).enabled


def test_section_is_read() -> None:
    config = parse_config(
        {SECTION: {"enabled": True, "rebalance_every": 10, "min_gain": 0, "pinned_cuts": [3]}}
    )
    assert config.enabled
    assert config.rebalance_every == 10
    assert config.min_gain == 0.0
    assert config.pinned_cuts == [3]


def test_all_defaults_written_out_are_valid() -> None:
    written = DynamicPipelineConfig().model_dump()
    assert parse_config({SECTION: written}) == DynamicPipelineConfig()
    for every in ("never", 7):
        assert parse_config({SECTION: {**written, "rebalance_every": every}})


def test_config_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        DynamicPipelineConfig().enabled = True  # type: ignore[misc]


@pytest.mark.parametrize("section", [None, True, [], "auto", 3])
def test_section_that_is_no_mapping(section: object) -> None:
    with pytest.raises(ValueError, match='must be an object.*write {"dynamic_pipeline"'):
        parse_config({SECTION: section})


def test_misspelt_section_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'dynamic_pipeline'"):
        parse_config({"dynamic_pipelines": {"enabled": True}})
    assert parse_config({"pipeline": {}}) == DynamicPipelineConfig()


def test_unknown_keys_name_the_nearest() -> None:
    message = problems(rebalance_evry=3, zzz=1)
    assert (
        "rebalance_evry = 3: not a key of this section; did you mean 'rebalance_every'?" in message
    )
    assert "zzz = 1: not a key of this section; known keys are enabled, partitioner" in message


def test_key_that_is_not_text() -> None:
    with pytest.raises(ValueError, match="7 = 1: not a key"):
        parse_config({SECTION: {7: 1}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enabled", 1),
        ("enabled", "yes"),
        ("partitioner", "optimal:time"),
        ("partitioner", ""),
        ("partitioner", 3),
        ("cost", "flops"),
        ("rebalance_every", 0),
        ("rebalance_every", True),
        ("rebalance_every", 2.0),
        ("rebalance_every", "5"),
        ("rebalance_every", "always"),
        ("profile_batches", 0),
        ("profile_batches", True),
        ("smoothing", "average"),
        ("min_gain", 1),
        ("min_gain", -0.1),
        ("min_gain", float("nan")),
        ("min_gain", True),
        ("horizon_batches", 0),
        ("memory_cap_bytes", 0),
        ("memory_cap_bytes", 1e9),
        ("memory_cap_bytes", "16 apples"),
        ("memory_cap_bytes", []),
        ("memory_cap_bytes", [1, True]),
        ("pinned_cuts", [0]),
        ("pinned_cuts", 3),
        ("pinned_cuts", [True]),
        ("stage_speeds", []),
        ("stage_speeds", [1.0, 0.0]),
        ("stage_speeds", [1.0, float("inf")]),
        ("stage_speeds", [True]),
        ("allow_empty_stages", 0),
        ("first_batch", -1),
        ("first_batch", False),
        ("last_batch", -1),
        ("last_batch", 1.5),
        ("transfer_buffer_bytes", 1000),
        ("transfer_buffer_bytes", "1KiB"),
    ],
)
def test_value_that_breaks_its_rule(key: str, value: object) -> None:
    message = problems(**{key: value})
    assert message.startswith('1 problem in section "dynamic_pipeline":')
    assert message.count("\n  - ") == 1
    assert f"{key} = " in message
    assert "must be" in message
    assert "for example" in message


def test_every_problem_in_one_message() -> None:
    message = problems(
        enable=True, min_gain=2, profile_batches="3", first_batch=9, last_batch=4,
        rebalance_every=5, horizon_batches=7, partitioner="uniform", stage_speeds=[1.0, 0.5],
    )  # fmt: skip
    assert message.startswith("6 problems")
    for part in (
        "did you mean 'enabled'",
        "min_gain = 2",
        "profile_batches = '3'",
        "first_batch = 9, last_batch = 4",
        "horizon_batches = 7, rebalance_every = 5",
        "stage_speeds = [1.0, 0.5], partitioner = 'uniform'",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"first_batch": 5, "last_batch": 4}, "can't come before the first"),
        ({"rebalance_every": 3, "horizon_batches": 5}, "used by 'auto' only"),
        ({"rebalance_every": "never", "horizon_batches": 5}, "used by 'auto' only"),
        ({"rebalance_every": "never", "first_batch": 5}, "no dynamic phase"),
        ({"rebalance_every": "never", "last_batch": 5}, "no dynamic phase"),
        ({"last_batch": 2, "profile_batches": 4}, "no decision could ever be made"),
        ({"partitioner": "balanced", "memory_cap_bytes": 5}, "can't honour it"),
        ({"partitioner": "uniform", "memory_cap_bytes": 5}, "can't honour it"),
        ({"partitioner": "balanced", "stage_speeds": [1.0]}, "can't honour it"),
        ({"stage_speeds": [1.0], "memory_cap_bytes": [5, 6]}, "1 and 2 stages"),
        ({"schedule": "1f1b", "activation_budget": 2}, "the budget is used by planned orders only; set schedule"),
    ],
)
def test_contradictions(section: dict[str, Any], text: str) -> None:
    message = problems(**section)
    assert message.startswith("1 problem ")
    assert text in message
    with pytest.raises(ValidationError, match=text):
        DynamicPipelineConfig(**section)


def test_what_is_no_contradiction() -> None:
    for section in (
        {"partitioner": "uniform", "cost": "time"},
        {"partitioner": "balanced", "pinned_cuts": [2]},
        {"partitioner": "my_own", "memory_cap_bytes": 5},
        {"last_batch": 3, "profile_batches": 4},
        {"first_batch": 4, "last_batch": 4},
        {"rebalance_every": "never", "min_gain": 0.2},
    ):
        assert parse_config({SECTION: section})


@pytest.mark.parametrize(
    ("text", "size"),
    [("1B", 1), ("2 KiB", 2048), ("1.5gib", 3 * 2**29), ("3MB", 3_000_000), ("1TiB", 2**40)],
)
def test_sizes_as_text(text: str, size: int) -> None:
    assert parse_bytes(text) == size
    assert parse_config({SECTION: {"memory_cap_bytes": text}}).memory_cap_bytes == size
    assert parse_config({SECTION: {"memory_cap_bytes": [text, 9]}}).memory_cap_bytes == [size, 9]


def test_fits_the_model() -> None:
    section = {"enabled": True, "pinned_cuts": [1, 7], "stage_speeds": [1.0, 0.5]}
    check_against_model(parse_config({SECTION: section}), num_layers=8, num_stages=2)


def test_disabled_section_is_not_held_against_the_model() -> None:
    config = parse_config({SECTION: {"stage_speeds": [1.0]}})
    check_against_model(config, num_layers=2, num_stages=4)


def test_all_model_problems_in_one_message() -> None:
    section = {"pinned_cuts": [1, 8], "stage_speeds": [1.0], "memory_cap_bytes": [5]}
    message = model_problems(section, num_layers=8, num_stages=7)
    assert message.startswith("3 problems")
    assert "stage_speeds = [1.0]: 1 entries, but there are 7 stages" in message
    assert "memory_cap_bytes = [5]: 1 entries, but there are 7 stages" in message
    assert "with 8 layers a cut lies between 1 and 7; remove 8" in message


def test_a_budget_in_which_one_micro_batch_finds_no_room() -> None:
    message = model_problems({"activation_budget": 0.2}, num_layers=8, num_stages=4, num_micro_batches=8)
    assert "activation_budget = 0.2: under 1F1B a worker holds at most 4 micro-batches" in message
    assert "that one finds room needs 0.25 or more; raise the budget, or remove it (1.0)" in message
    few = model_problems({"activation_budget": 0.3}, num_layers=8, num_stages=4, num_micro_batches=2)
    assert "at most 2 micro-batches; that one finds room needs 0.5 or more" in few
    enough = parse_config({SECTION: {"enabled": True, "activation_budget": 0.25}})
    check_against_model(enough, num_layers=8, num_stages=4, num_micro_batches=8)


def test_an_unknown_schedule() -> None:
    assert "schedule = 'gpipe': must be \"auto\", \"1f1b\" or \"planned\"" in problems(schedule="gpipe")
    assert "activation_budget = 0: must be a finite number > 0" in problems(activation_budget=0)


def test_too_few_cuts_for_the_stages() -> None:
    message = model_problems({"pinned_cuts": [1, 2]}, num_layers=5, num_stages=4)
    assert "5 layers with 2 allowed cuts can't fill 4 stages: 3 cuts are needed" in message
    config = parse_config(
        {SECTION: {"enabled": True, "pinned_cuts": [1, 2], "allow_empty_stages": True}}
    )
    check_against_model(config, num_layers=5, num_stages=4)


def test_partitioner_of_the_module_counts_too() -> None:
    model = {"num_layers": 8, "num_stages": 2, "partitioner": "uniform"}
    message = model_problems({"memory_cap_bytes": 5}, **model)
    assert "memory_cap_bytes = 5, partition_method = 'uniform': this partitioner can't" in message


def test_document_shows_a_real_message() -> None:
    message = problems(min_gain=5, rebalance_evry=10, first_batch=100, last_batch=10)
    assert message in DOCUMENT.read_text(encoding="utf-8")
