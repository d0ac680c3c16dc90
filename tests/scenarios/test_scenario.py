"""The interface between scenarios and the training loop, and the registry."""

from __future__ import annotations

import pytest

from scenarios import scenario as registry
from scenarios.freezing import ScheduledFreezing
from scenarios.scenario import Scenario, build_layers, build_scenario, register_scenario, scenario_names
from tests.scenarios.fakes import TINY, FakeEngine, run


class Counting(Scenario):
    """A user's own scenario."""

    def __init__(self, start: int = 0) -> None:
        self.count = start

    def after_batch(self, engine: registry.Engine, batch: int) -> None:
        """Count batches."""
        self.count += 1

    def report(self, engine: registry.Engine) -> dict[str, float | int | str]:
        """Report the count."""
        return {"batches": self.count}


def test_none_changes_nothing() -> None:
    """The base is a plain dense model."""
    scenario = build_scenario("none", {})
    engine = FakeEngine(scenario)
    run(engine, scenario, range(2))
    assert engine.frozen() == [False] * 6
    assert scenario.report(engine) == {}


def test_by_name_with_settings() -> None:
    """The configuration's other keys are keyword arguments."""
    scenario = build_scenario("freezing", {"batches": [2], "frozen": [3]})
    assert isinstance(scenario, ScheduledFreezing)
    assert len(build_layers(scenario, TINY)) == 6


def test_own_scenario_by_path_and_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class need not be registered to be used."""
    monkeypatch.setattr(registry, "_SCENARIOS", dict(registry._SCENARIOS))
    found = build_scenario("tests.scenarios.test_scenario:Counting", {"start": 5})
    engine = FakeEngine(found)
    run(engine, found, range(3))
    assert found.report(engine) == {"batches": 8}
    register_scenario("counting", Counting)
    assert "counting" in scenario_names()
    assert isinstance(build_scenario("counting", {}), Counting)
    with pytest.raises(ValueError, match="named 'counting' exists already"):
        register_scenario("counting", Counting)


def test_unknown_names_and_settings() -> None:
    """Messages list what there is."""
    with pytest.raises(ValueError, match="no scenario 'freesing': choose one of combined, .*freezing, .*none"):
        build_scenario("freesing", {})
    with pytest.raises(ValueError, match="'freezing' does not take these settings: scenario.speed is not a setting: "
                       "choose one of batches, frozen, cache, cache_mib"):
        build_scenario("freezing", {"speed": 3})
    with pytest.raises(ValueError, match="scenario.batches='x' must be a list, each a whole number"):
        build_scenario("freezing", {"batches": "x"})
    with pytest.raises(ValueError, match="scenario.routing='random' must be one of token_choice, "):
        build_scenario("moe", {"routing": "random"})
    with pytest.raises(ValueError, match="cannot be imported"):
        build_scenario("tests.nowhere:Counting", {})
    with pytest.raises(ValueError, match="must be a subclass"):
        build_scenario("tests.scenarios.fakes:FakeEngine", {})
