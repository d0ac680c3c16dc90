"""The profile value: figures derived from it, JSON and back, smoothing, predicted batch time."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynpipe_ds.measure.profile import (
    LayerProfile,
    PipelineProfile,
    StageProfile,
    smooth,
)

STAGE = StageProfile(
    busy_s=6.0, fill_drain_s=1.0, waiting_s=1.0, step_s=0.5, batch_s=9.0, peak_memory_bytes=77
)


def layer(name: str = "layer", **changes: Any) -> LayerProfile:
    """A layer of one forward and two backward seconds."""
    values: dict[str, Any] = {
        "forward_s": 1.0, "backward_s": 2.0, "num_parameters": 10, "parameter_bytes": 40,
        "gradient_bytes": 20, "optimizer_state_bytes": 80, "activation_bytes": 5,
    }  # fmt: skip
    return LayerProfile(name, **{**values, **changes})


def profile(*seconds: float, batch: int = 0, boundaries: tuple[int, ...] = ()) -> PipelineProfile:
    """Layers with these forward seconds and no backward, on two stages."""
    cuts = boundaries or (0, 1, len(seconds))
    layers = tuple(layer(f"layer{i}", forward_s=s, backward_s=0.0) for i, s in enumerate(seconds))
    return PipelineProfile(batch, cuts, 4, layers, (STAGE,) * (len(cuts) - 1))


def seconds(smoothed: PipelineProfile) -> list[float]:
    """Its layer times, rounded."""
    return [round(value, 12) for value in smoothed.costs("time")]


def test_layer_figures() -> None:
    assert layer().seconds == 3.0
    assert layer().state_bytes == 140


def test_stage_figures() -> None:
    assert STAGE.idle_s == 2.0
    assert STAGE.bubble_ratio == 0.25
    assert StageProfile(0.0, 0.0, 0.0, 0.0, 0.0, 0).bubble_ratio == 0.0


def test_pipeline_figures() -> None:
    value = profile(1.0, 2.0, 4.0)
    assert value.costs() == value.costs("time") == [1.0, 2.0, 4.0]
    assert value.costs("parameters") == [10.0, 10.0, 10.0]
    assert value.state_bytes() == [140] * 3
    assert value.moved_bytes() == [120] * 3
    assert value.activation_bytes() == [5] * 3
    assert value.bubble_ratio == 0.25
    assert value.imbalance == 0.0
    slow = replace(value, stages=(replace(STAGE, busy_s=10.0), STAGE))
    assert slow.imbalance == pytest.approx(4.0 / 8.0)
    assert value.stage_seconds() == [1.0, 6.0]
    assert value.stage_seconds((0, 2, 2, 3)) == [3.0, 0.0, 4.0]
    assert value.stage_seconds((0, 2, 3), speeds=[1.0, 0.5]) == [3.0, 8.0]
    with pytest.raises(ValueError, match="cost = 'flops': must be 'time' or 'parameters'"):
        value.costs("flops")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"boundaries = \(0, 2\): must rise from 0 .* 3"):
        value.stage_seconds((0, 2))


def test_profile_before_anything_ran() -> None:
    value = PipelineProfile(0, (), 1, (layer(),), ())
    assert value.bubble_ratio == value.imbalance == 0.0
    with pytest.raises(ValueError, match="boundaries"):
        value.stage_seconds()


def test_unequal_workers() -> None:
    slow_second = profile(1.0, 4.0, 4.0)
    assert slow_second.at_unit_speed([1.0, 0.5]).costs() == [1.0, 2.0, 2.0]
    with pytest.raises(ValueError, match="need one for each stage"):
        slow_second.at_unit_speed([1.0])


def test_other_seconds() -> None:
    """As if every layer had been made anew."""
    value = profile(1.0, 4.0, 4.0)
    other = value.with_seconds(forward_s=[0.5, 0.25, 0.125], weight_s=[0.0, 0.1, 0.2])
    assert other == replace(value, layers=tuple(
        replace(old, forward_s=forward_s, weight_s=weight_s)
        for old, forward_s, weight_s in zip(value.layers, (0.5, 0.25, 0.125), (0.0, 0.1, 0.2), strict=True)
    ))  # fmt: skip
    assert hash(other.layers) != hash(value.layers) and value == profile(1.0, 4.0, 4.0)
    assert PipelineProfile.loads(other.dumps()) == other
    assert value.with_seconds() == value
    with pytest.raises(ValueError, match="seconds: must be one of forward_s, backward_s, weight_s, split_s"):
        value.with_seconds(seconds=[1.0] * 3)
    with pytest.raises(ValueError, match="split_s has 2 seconds: need one for each of 3 layers"):
        value.with_seconds(split_s=[1.0] * 2)
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="forward_s = .*: must be finite seconds >= 0"):
            value.with_seconds(forward_s=[1.0, bad, 1.0])


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), "1", None, True])
def test_impossible_times(bad: object) -> None:
    with pytest.raises(ValueError, match="layer 'attention': forward_s = .*finite seconds >= 0"):
        layer("attention", forward_s=bad)


@pytest.mark.parametrize("bad", [-1, 1.0, True, None])
def test_impossible_sizes(bad: object) -> None:
    with pytest.raises(ValueError, match="layer 'attention': parameter_bytes = .*whole number"):
        layer("attention", parameter_bytes=bad)


@pytest.mark.parametrize("bad", [(0, 1), (1, 3), (0, 2, 1, 3), (3,), (0, 4)])
def test_boundaries_must_cover_the_layers(bad: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must rise from 0 to the number of layers, 3"):
        PipelineProfile(0, bad, 1, (layer(),) * 3, ())


def test_other_misfits() -> None:
    with pytest.raises(ValueError, match="name 2 stages, but there are 1 stage profiles"):
        PipelineProfile(0, (0, 1, 2), 1, (layer(),) * 2, (STAGE,))
    with pytest.raises(ValueError, match="num_micro_batches = 0: must be >= 1"):
        PipelineProfile(0, (0, 1), 0, (layer(),), ())
    with pytest.raises(ValueError, match="batch = -1"):
        PipelineProfile(-1, (0, 1), 1, (layer(),), ())


def test_saved_and_loaded_is_equal(tmp_path: Path) -> None:
    value = profile(0.1, 1e-9, 1 / 3, batch=12)
    value.save(tmp_path / "profile.json")
    assert PipelineProfile.load(tmp_path / "profile.json") == value
    assert PipelineProfile.load(str(tmp_path / "profile.json")) == value


def edit(data: dict[str, Any], path: str, value: object) -> None:
    """Set ``a.0.b`` of nested JSON; delete it when the value is Ellipsis."""
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
    target: Any = data
    for key in parents:
        target = target[key]
    if value is ...:
        del target[last]
    else:
        target[last] = value


@pytest.mark.parametrize(
    ("path", "value", "match"),
    [
        ("format", "other", 'not a valid profile: must have "format": "dynpipe_ds.profile"'),
        ("format", ..., "must have"),
        ("version", 2, "version = 2: this release reads version 1; record the profile again"),
        ("version", ..., "version = None"),
        ("layers", ..., "profile: missing layers"),
        ("layers", {}, "layers = {}: must be a list"),
        ("layers.1", 5, r"layers\[1\] must be a JSON object, not int"),
        ("layers.1.forward_s", ..., r"layers\[1\]: missing forward_s"),
        ("layers.1.forward_s", -1.0, r"layers\[1\]: layer 'layer1': forward_s = -1.0"),
        ("layers.1.backward_s", float("nan"), r"layers\[1\]: layer 'layer1': backward_s = nan"),
        ("layers.1.forwards", 1.0, r"layers\[1\]: unknown forwards"),
        ("layers.1.name", 1, r"layers\[1\]: layer 1: name = 1: must be text"),
        ("stages.0.busy_s", "fast", r"stages\[0\]: stage: busy_s = 'fast'"),
        ("boundaries", [0, 1.0, 3], r"boundaries = \[0, 1.0, 3\]: must be whole numbers"),
        ("boundaries", [0, 1, 4], "must rise from 0 to the number of layers, 3"),
        ("num_micro_batches", "4", "num_micro_batches = '4': must be a whole number"),
    ],
)
def test_invalid_file(tmp_path: Path, path: str, value: object, match: str) -> None:
    file = tmp_path / "profile.json"
    profile(1.0, 2.0, 3.0).save(file)
    data = json.loads(file.read_text())
    edit(data, path, value)
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"profile .*profile.json: .*{match}"):
        PipelineProfile.load(file)


def test_no_file_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent.json: no such file; write one with"):
        PipelineProfile.load(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(ValueError, match="text.json: not a valid profile: Expecting property name"):
        PipelineProfile.load(tmp_path / "text.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="list.json: not a valid profile: must have"):
        PipelineProfile.load(tmp_path / "list.json")


def test_smoothing() -> None:
    batches = [profile(1.0, 8.0), profile(4.0, 2.0), profile(1.0, 5.0)]
    assert seconds(smooth(batches, "median")) == [1.0, 5.0]
    assert seconds(smooth(batches, "mean")) == [2.0, 5.0]
    assert seconds(smooth(batches, "ema")) == [1.75, 5.0]
    assert smooth(batches[:1]) == batches[0]


def test_smoothing_takes_the_rest_from_the_newest() -> None:
    old = profile(1.0, 2.0, 3.0, batch=6, boundaries=(0, 1, 3))
    new = profile(3.0, 2.0, 1.0, batch=7, boundaries=(0, 2, 3))
    grown = tuple(replace(part, activation_bytes=99) for part in new.layers)
    new = replace(new, layers=grown, num_micro_batches=8)
    smoothed = smooth([old, new], "mean")
    assert seconds(smoothed) == [2.0, 2.0, 2.0]
    assert (smoothed.batch, smoothed.boundaries, smoothed.num_micro_batches) == (7, (0, 2, 3), 8)
    assert smoothed.activation_bytes() == [99] * 3


def test_smoothing_on_unequal_workers_is_by_each_batchs_boundaries() -> None:
    before = profile(1.0, 2.0, 2.0, boundaries=(0, 1, 3))
    after = profile(1.0, 1.0, 2.0, boundaries=(0, 2, 3))
    assert seconds(smooth([before, after], "mean", speeds=[1.0, 0.5])) == [1.0, 1.0, 1.0]


def test_smoothing_refuses() -> None:
    with pytest.raises(ValueError, match="need at least one"):
        smooth([])
    with pytest.raises(ValueError, match="how = 'max': must be one of 'median', 'mean', 'ema'"):
        smooth([profile(1.0, 2.0)], "max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"profiles have \[2, 3\] layers"):
        smooth([profile(1.0, 2.0), profile(1.0, 2.0, 3.0)])
