"""The JSON schema takes what the section takes, and refuses what single keys refuse."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from dynpipe_ds.config import SECTION, DynamicPipelineConfig, parse_config
from dynpipe_ds.schema import json_schema
from dynpipe_ds.sections import parse_bytes

jsonschema = pytest.importorskip("jsonschema")

SCHEMA = json_schema()


def by_schema(section: Any) -> bool:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    return bool(validator.is_valid({"train_batch_size": 8, SECTION: section}))


def by_section(section: Any) -> bool:
    try:
        parse_config({SECTION: section})
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "section",
    [
        {}, {"enabled": True}, {"enabled": 1}, {"enabled": "true"}, {"enable": True}, [], None,
        {"rebalance_every": 5}, {"rebalance_every": 0}, {"rebalance_every": "always"}, {"min_gain": 1.0},
        {"min_gain": 0.0}, {"partitioner": "optimal:time"}, {"partitioner": "mine"}, {"cost": "seconds"},
        {"memory_cap_bytes": "16GiB"}, {"memory_cap_bytes": "1.5 gb"}, {"memory_cap_bytes": "much"},
        {"memory_cap_bytes": ["1GiB", 5]}, {"memory_cap_bytes": []}, {"memory_cap_bytes": 0},
        {"memory_cap_bytes": "5 iB"}, {"transfer_buffer_bytes": 5}, {"transfer_buffer_bytes": "64MiB"},
        {"pinned_cuts": [3]}, {"pinned_cuts": [0]}, {"stage_speeds": [1.0, 0.0]}, {"hold_batches": "forever"},
        {"repack": {"enabled": True, "tolerance": 0.1}}, {"repack": {"enabled": True, "tolerance": 1}},
        {"repack": {"release": {}}}, {"repack": {"release": {"backend": "slurm", "job_id": "1"}}},
        {"repack": {"release": {"backend": "slurm", "jobid": "1"}}}, {"repack": {"release": {"backend": "lsf"}}},
        {"repack": {"release": {"backend": "site.tools:Back", "queue": 3}}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_it_says_what_the_section_says(section: Any) -> None:
    assert by_schema(section) == by_section(section)


def test_every_default_is_right_and_written_out() -> None:
    values = json.loads(DynamicPipelineConfig().model_dump_json())
    assert by_schema(values)
    properties = SCHEMA["properties"][SECTION]["properties"]
    assert {name: key["default"] for name, key in properties.items()} == values


def test_every_key_is_described_with_its_rule_and_an_example() -> None:
    keys = dict(SCHEMA["properties"][SECTION]["properties"])
    for model in SCHEMA["$defs"].values():
        keys |= model["properties"]
    assert len(keys) > 20
    for key in keys.values():
        assert re.search(r"\. Must be .+; for example .+\.$", key["description"])
        assert not {"rule", "example", "title"} & key.keys()


def test_a_size_without_a_unit_is_refused_as_every_other_wrong_one() -> None:
    """It once ended in a ``KeyError``."""
    assert parse_bytes("5 iB") == "5 iB"
    assert parse_bytes("5 b") == 5
