"""A newcomer's papers: every difference is named, and what is equal in another process is equal here."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from dynpipe_ds.host.specs import LayerSpec, TiedLayerSpec
from dynpipe_ds.joining.papers import describe, describe_layers, differences, versions


@dataclass
class Settings:
    width: int = 8
    rates: list[float] = field(default_factory=lambda: [0.5])
    what: Any = nn.Linear


def scaled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def model(width: int = 8, key: str = "k") -> list[Any]:
    settings = Settings(width)
    specs = [
        TiedLayerSpec(key, nn.Linear, 4, 4, tied_weight_attr="weight"), LayerSpec(nn.Linear, width, 3, bias=False),
        partial(scaled), nn.Linear(2, 2), LayerSpec(nn.Module, settings, torch.zeros(3)),
    ]
    return describe_layers(["a", "b", "c", "d", "e"], specs)


def test_the_same_is_the_same_elsewhere() -> None:
    code = "import json; from tests.joining.test_papers import model; print('papers', json.dumps(model()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    import json

    there = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("papers"))[7:])
    assert differences({"model": json.loads(json.dumps(model()))}, {"model": there}) == []


@pytest.mark.parametrize(("other", "texts"), [
    (model(9), ["model[1].of[1][0]: 8 in the job, 9 here", "model[4].of[1][0].width: 8 in the job, 9 here"]),
    (model(key="l"), ["model[0].of[3].key: 'k' in the job, 'l' here"]),
    (model()[:-1], ["model: 5 of them in the job, 4 here"]),
])  # fmt: skip
def test_models(other: list[Any], texts: list[str]) -> None:
    found = differences({"model": model()}, {"model": other})
    assert [line.partition(";")[0] for line in found] == texts
    assert all(line.endswith("start the script with the arguments that the job's ranks have") for line in found)


def test_json_and_versions() -> None:
    ours = {"config": {"a": {"b": 1}, "c": 2}, "versions": versions(deepspeed="0.19.8")}
    theirs = {"config": {"a": {"b": 2}, "d": 3}, "versions": versions(deepspeed="0.19.4")}
    found = differences(ours, theirs)
    assert [line.partition(";")[0] for line in found] == [
        "config.a.b: 1 in the job, 2 here", "config.c: 2 in the job, None here", "config.d: None in the job, 3 here",
        "versions.deepspeed: '0.19.8' in the job, '0.19.4' here",
    ]
    assert differences(ours, ours) == []


def test_papers_that_are_missing_are_a_difference() -> None:
    assert differences({"data": {"samples": 3}}, {}) == [
        "data: {'samples': 3} in the job, None here; give it the data that the job's ranks have"
    ]


def test_many_differences_are_cut_short() -> None:
    found = differences({"config": dict.fromkeys(map(str, range(50)), 1)}, {"config": {}})
    assert len(found) == 9 and "42 more" in found[-1]


def test_objects_have_no_addresses() -> None:
    assert "0x" not in repr(describe([object(), Settings(), lambda x: x, {Settings}, torch.float16, nn.ReLU()]))
