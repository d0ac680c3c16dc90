"""The "repack" section: defaults, every problem in one message, contradictions, back-ends."""

from __future__ import annotations

from typing import Any

import pytest

from dynpipe_ds.config import SECTION, check_against_model, parse_config
from dynpipe_ds.release.options import CallbackOptions, ExitOptions, KubernetesOptions, OwnOptions, SlurmOptions
from dynpipe_ds.repacking.config import RepackConfig


def parse(repack: Any, **others: Any) -> RepackConfig:
    return parse_config({SECTION: {"enabled": True, "repack": repack, **others}}).repack


def problems(repack: Any, **others: Any) -> str:
    with pytest.raises(ValueError) as caught:
        parse(repack, **others)
    return str(caught.value)


def test_defaults() -> None:
    config = parse({})
    assert config == RepackConfig() == parse_config({}).repack
    assert not config.enabled and config.tolerance == 0.05 and config.target_stages is None
    assert config.release == ExitOptions()
    assert parse(config.model_dump()) == config


@pytest.mark.parametrize(
    ("release", "options"),
    [
        ({"backend": "exit"}, ExitOptions()),
        ({"backend": "slurm", "job_id": "7"}, SlurmOptions(job_id="7")),
        (
            {"backend": "kubernetes", "mode": "indexed-job", "name": "train"},
            KubernetesOptions(mode="indexed-job", name="train"),
        ),
        ({"backend": "callback", "command": ["give", "{nodes}"]}, CallbackOptions(command=["give", "{nodes}"])),
        ({"backend": "site.tools:GiveBack", "queue": 3}, OwnOptions(backend="site.tools:GiveBack", queue=3)),
    ],
)
def test_back_ends(release: dict[str, Any], options: Any) -> None:
    config = parse({"release": release})
    assert type(config.release) is type(options) and config.release == options
    assert {"backend": config.release.backend, **config.release.arguments()}.items() >= release.items()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enabled", 1), ("method", "best"), ("target_stages", 0), ("target_stages", True), ("target_stages", 2.0),
        ("tolerance", 1), ("tolerance", -0.1), ("tolerance", float("nan")), ("tolerance", True), ("min_stages", 0),
        ("earliest_batch", -1), ("release", "slurm"), ("release", None),
    ],
)
def test_value_that_breaks_its_rule(key: str, value: object) -> None:
    message = problems({key: value})
    assert message.startswith('1 problem in section "dynamic_pipeline":')
    assert message.count("\n  - ") == 1
    assert f"repack.{key} = " in message and "must be" in message and "for example" in message


@pytest.mark.parametrize("value", [None, True, [], "on"])
def test_section_that_is_no_mapping(value: object) -> None:
    assert f"repack = {value!r}: must be an object with the keys of repack" in problems(value)


@pytest.mark.parametrize(
    ("release", "text"),
    [
        ({}, "repack.release.backend is missing: give \"exit\", \"stay\", \"slurm\""),
        ({"backend": "slrum"}, "repack.release.backend = 'slrum': must be \"exit\", \"stay\", \"slurm\""),
        ({"backend": 3}, "repack.release.backend = 3: must be"),
        ({"backend": "slurm", "jobid": "3"}, "repack.release.jobid = '3': not a key of this section; did you mean"),
        ({"backend": "slurm", "timeout_s": 0}, "repack.release.timeout_s = 0: must be a number of seconds > 0"),
        ({"backend": "exit", "job_id": "3"}, "repack.release.job_id = '3': not a key"),
        ({"backend": "kubernetes", "mode": "indexed-job"}, "repack.release.name is missing: give the object's name"),
        ({"backend": "kubernetes", "mode": "pod", "name": "x"}, "repack.release.mode = 'pod': must be"),
        ({"backend": "callback"}, "exactly one says what to call"),
        ({"backend": "callback", "command": ["x"], "function": "a:b"}, "exactly one says what to call"),
        ({"backend": "callback", "function": "nowhere"}, "must be null or \"package.module:function\""),
    ],
)
def test_release_that_is_refused(release: dict[str, Any], text: str) -> None:
    message = problems({"release": release})
    assert message.startswith("1 problem ") and text in message


def test_every_problem_in_one_message() -> None:
    message = problems(
        {
            "enable": True, "tolerance": 2, "target_stages": 1, "min_stages": 2,
            "release": {"backend": "slurm", "jib": 1},
        },
        min_gain=5,
    )
    assert message.startswith("5 problems")
    for part in (
        "min_gain = 5", "repack.enable = True: not a key of this section; did you mean 'enabled'?",
        "repack.tolerance = 2", "repack.release.jib = 1", "repack.target_stages = 1, repack.min_stages = 2",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("repack", "text"),
    [
        ({"target_stages": 2, "tolerance": 0.1}, "a target is reached whatever it costs"),
        ({"method": "first_fit", "tolerance": 0.1}, "first fit looks at memory alone"),
        ({"target_stages": 2, "min_stages": 3}, "can't be below the fewest stages"),
        ({"target_stages": 5, "max_stages": 4}, "the most stages can't be below these"),
        ({"tolerance": 0.3, "min_gain": 0.4}, "would be added and given up again for the same load"),
        ({"enabled": True, "method": "first_fit"}, "memory_cap_bytes = None: first fit packs by memory alone"),
    ],
)
def test_contradictions(repack: dict[str, Any], text: str) -> None:
    message = problems(repack)
    assert message.startswith("1 problem ") and text in message


def test_a_target_above_the_stages_waits_for_workers() -> None:
    config = parse_config({SECTION: {"enabled": True, "repack": {"enabled": True, "target_stages": 5}}})
    check_against_model(config, num_layers=8, num_stages=4)


def test_what_stands_for_no_least_gain() -> None:
    """A tenth above what makes up for the tolerance, however large that is."""
    for tolerance, gain in ((0.0, 0.1), (0.05, 0.1579), (0.5, 1.2)):
        config = parse_config({SECTION: {"enabled": True, "repack": {"tolerance": tolerance}}})
        assert config.repack.least_gain == pytest.approx(gain, abs=1e-4)
    assert parse_config({SECTION: {"enabled": True, "repack": {"min_gain": 0.3}}}).repack.least_gain == 0.3
