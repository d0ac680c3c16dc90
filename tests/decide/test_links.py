"""What messages take is remembered boundary by boundary, and plans count it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynpipe_ds.decide import Balancer
from dynpipe_ds.decide.links import Links
from dynpipe_ds.measure.profile import PipelineProfile
from dynpipe_ds.simulation import Workload, predicted_batches_s, simulate
from tests.decide.synthetic import profile

CUTS = (0, 2, 4, 6)


def batch(number: int, *link_s: float | None) -> PipelineProfile:
    return replace(profile([0.01] * 6, CUTS, batch=number), link_s=link_s)


def test_the_median_of_the_newest_is_known() -> None:
    links = Links()
    assert links.observe(batch(0, None, 0.002)).link_s == (None, 0.002)
    assert links.observe(batch(1, 0.004, 0.001)).link_s == (0.004, 0.0015)
    assert links.observe(batch(2, None, None)).link_s == (0.004, 0.0015), "what could not be measured is as it was"
    for number in range(3, 20):
        known = links.observe(batch(number, 0.003, 0.005))
    assert known.link_s == (0.003, 0.005)
    again = Links()
    again.load_state_dict(links.state_dict())
    assert again.observe(batch(20, None, None)).link_s == known.link_s


def test_another_number_of_stages_begins_anew() -> None:
    links = Links()
    links.observe(batch(0, 0.002, 0.002))
    assert links.observe(replace(profile([0.01] * 6, (0, 3, 6)), link_s=(None,))).link_s == (None,)


def test_predictions_count_what_is_known() -> None:
    balancer = Balancer.from_section({"enabled": True, "profile_batches": 1})
    balancer.observe(batch(0, 0.002, None))
    known = balancer.smoothed()
    assert known is not None and known.link_s == (0.002, None)
    workload = Workload.from_profile(known)
    assert workload.activation_link_s[:, 0].tolist() == workload.gradient_link_s[:, 0].tolist() == [0.002, 0.0]
    without = replace(known, link_s=())
    assert simulate(workload).makespan_s > simulate(Workload.from_profile(without)).makespan_s
    assert predicted_batches_s([(known, CUTS)]) == [pytest.approx(simulate(workload).makespan_s)]
    assert Workload.from_profile(known, (0, 3, 6)).activation_link_s.tolist() == [[0.0]], "of other stages nothing"
    assert Workload.from_profile(known, activation_link_s=0.5).activation_link_s[0, 0] == 0.5


def test_a_slow_link_changes_the_cut() -> None:
    """Stages around it get less work, or the rest more: what a stage waits for is no use to it (DynPipe D.2)."""
    def measured(link_s: float) -> PipelineProfile:
        return replace(profile([0.01] * 12, (0, 4, 8, 12), num_micro_batches=6), link_s=(0.0, link_s))

    def chosen(link_s: float) -> tuple[int, ...]:
        section = {"enabled": True, "profile_batches": 1, "partitioner": "simulated", "schedule": "1f1b"}
        balancer = Balancer.from_section(section)
        balancer.observe(measured(link_s))
        return balancer.choose((0, 4, 8, 12)).boundaries

    usual, other = chosen(0.0), chosen(0.03)
    assert usual == (0, 4, 8, 12) and other != usual
    usual_s, other_s = (simulate(Workload.from_profile(measured(0.03), cuts)).makespan_s for cuts in (usual, other))
    assert other_s < 0.97 * usual_s
