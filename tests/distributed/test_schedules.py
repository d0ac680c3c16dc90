"""The engine runs what its controller chooses: a planned order, agreed by all ranks, and the bits stay."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from dynpipe_ds.decide.ordering import Ordering
from dynpipe_ds.planning import pace, plan_order
from dynpipe_ds.planning.pace import AS_MACHINE_CODE, IN_PYTHON
from dynpipe_ds.schedule import Order, order_of
from dynpipe_ds.simulation import Workload
from dynpipe_ds.simulation.compiled import is_compiled
from dynpipe_ds.telling import listeners
from tests.distributed.configs import ADAMW, CLIP
from tests.distributed.models import Run, data, digest, make_engine, train
from tests.distributed.ranks import run_ranks
from tests.distributed.splitting import counting_splits

PROFILED = {"enabled": True, "rebalance_every": "never", "profile_every": 1}


def planned(num_micro_batches: int, num_stages: int, seed: int = 0) -> Order:
    """What is planned for stages that differ, another one for each seed."""
    forward_s = [1.0 + ((seed + 3 * stage) % 5) / 4 for stage in range(num_stages)]
    workload = Workload(forward_s, [2 * s for s in forward_s], num_micro_batches, weight_s=forward_s)
    order = plan_order(workload).order
    assert order != order_of("1f1b", num_micro_batches, num_stages)
    return order


class Chosen:
    """What a controller's choices are replaced by: another planned order after every batch."""

    def __init__(self, wrong_on: int | None = None, raising_on: int | None = None) -> None:
        self.wrong_on, self.raising_on, self.asked = wrong_on, raising_on, 0

    def __call__(self, profile: Any, boundaries: Sequence[int]) -> Order:
        import torch.distributed as dist

        self.asked += 1
        if dist.get_rank() == self.raising_on and self.asked == 2:
            raise ArithmeticError("no order today")
        size = profile.num_micro_batches, len(boundaries) - 1
        if dist.get_rank() == self.wrong_on and self.asked == 2:
            return order_of("1f1b", *size)
        return planned(*size, seed=self.asked)


def choosing(engine: Any, chosen: Chosen) -> None:
    ordering = engine.dynamic.balancer.ordering
    ordering.choose, ordering.is_due = chosen, lambda: True


def by_choice(_rank: int, run: Run, chosen: Chosen) -> tuple[Any, Any, int, list[str], str]:
    told: list[str] = []
    listeners.append(told.append)
    plain = make_engine(run)
    usual = train(plain, run), digest(plain)
    with counting_splits() as split:
        engine = make_engine(run)
        choosing(engine, chosen)
        found = train(engine, run), digest(engine)
    listeners.remove(told.append)
    return usual, found, len(split), [text for text in told if "failed" in text], str(engine.order)


@pytest.mark.parametrize("num_stages", [2, 4])
def test_chosen_orders_run_and_keep_the_bits(num_stages: int) -> None:
    run = Run(num_stages, 6, config={**ADAMW, **CLIP, "dynamic_pipeline": {**PROFILED, "schedule": "planned"}})
    ranks = run_ranks(by_choice, num_stages, run, Chosen())
    for rank, (usual, found, num_split, warned, order) in enumerate(ranks):
        assert found == usual and not warned
        assert num_split > 10 or rank == 0
        assert order == str(planned(4, num_stages, seed=6)), "engine.order: what the next batch runs"


def with_numba(rank: int, run: Run, lacking: int | None) -> tuple[Any, bool, Any]:
    if rank == lacking:
        sys.modules["numba"] = None  # type: ignore[assignment]
    with patch("dynpipe_ds.planning.planner._WORTH_COMPILING", 0):
        engine = make_engine(run)
    return (train(engine, run), digest(engine)), is_compiled(), pace()


@pytest.mark.parametrize("lacking", [None, 1])
def test_ranks_agree_on_how_fast_planning_is(lacking: int | None) -> None:
    """As fast as the slowest; where Numba is missing on one rank the others plan by its pace, and all plan alike."""
    pytest.importorskip("numba")
    run = Run(3, 6, config={**ADAMW, "dynamic_pipeline": {**PROFILED, "schedule": "planned"}})
    usual = run_ranks(train_as_1f1b, 3, run)
    ranks = run_ranks(with_numba, 3, run, lacking)
    for rank, (found, compiled, said) in enumerate(ranks):
        assert found == usual[rank] and compiled == (rank != lacking)
        assert said == ranks[0][2] == (AS_MACHINE_CODE if lacking is None else IN_PYTHON)


def train_as_1f1b(_rank: int, run: Run) -> Any:
    engine = make_engine(replace(run, config={**ADAMW}))
    return train(engine, run), digest(engine)


@pytest.mark.parametrize("fault", ["wrong_on", "raising_on"])
def test_an_order_that_ranks_disagree_on_is_not_run(fault: str) -> None:
    """Training goes on with the order it has, on every rank, and says so once."""
    run = Run(3, 5, config={**ADAMW, "dynamic_pipeline": PROFILED})
    ranks = run_ranks(by_choice, 3, run, Chosen(**{fault: 1}))
    assert all(found == usual for usual, found, *_ in ranks)
    (warning,) = ranks[0][3]
    assert "training goes on with [0, 3, 6, 8] and the order it has" in warning
    assert ("no order today" in warning) == (fault == "raising_on")
    assert len({order for *_, order in ranks}) == 1


def others(_rank: int, run: Run, folder: str) -> dict[str, Any]:
    """A batch of another size, an evaluated one, and a checkpoint, with a planned order in force."""
    engine = make_engine(run)
    choosing(engine, Chosen())
    batches = data(0, run.micro_batches)
    seen: dict[str, Any] = {"losses": [float(engine.train_batch(batches)) for _ in range(2)]}
    before = str(engine.order)
    seen["evaluated"] = float(engine.eval_batch(data(5, 4)))
    engine.set_train_batch_size(2 * 6)
    seen["in another size"] = engine.order == order_of("1f1b", 6, run.num_stages)
    seen["losses"].append(float(engine.train_batch(batches)))
    engine.set_train_batch_size(2 * 4)
    seen["planned for it"] = engine.order == order_of("1f1b", 4, run.num_stages)
    engine.dynamic.balancer.ordering.adopt(Order.parse(before), engine.partition)
    engine.save_checkpoint(folder)
    other = make_engine(run)
    other.load_checkpoint(folder)
    seen["resumed"] = str(other.order) == before
    other.repartition((0, 1, 6, 8))
    seen["moved"] = other.order == order_of("1f1b", 4, run.num_stages)
    seen["digest"] = digest(engine) if run.config["dynamic_pipeline"].get("schedule") != "1f1b" else None
    return seen


def test_batches_of_another_kind_and_checkpoints(tmp_path: Any) -> None:
    config = {**ADAMW, "dynamic_pipeline": {**PROFILED, "profile_batches": 1}}
    for seen in run_ranks(others, 3, Run(3, 4, config=config), str(tmp_path)):
        facts = ("in another size", "planned for it", "resumed", "moved")
        assert [fact for fact in facts if not seen[fact]] == [], "a moved one runs 1F1B until it is planned for"


FROZEN = plan_order(Workload(
    [1.0, 1.3, 1.1], [0.0, 2.0, 2.0], 6, weight_s=[0.0, 1.0, 1.0], frozen_boundaries=1, activation_bytes=[0, 1, 1],
)).order  # fmt: skip


def thaw(_rank: int, run: Run, order: Order | None) -> tuple[list[float], dict[str, str], list[bool]]:
    """A prefix is frozen, an order is planned with it, and it is thawed; one batch each on 1F1B, then two on that."""
    engine = make_engine(run)
    batches, losses, seen = data(0, run.micro_batches), [], []
    ordering = engine.dynamic.balancer.ordering
    ordering.is_due = lambda: False
    for frozen in (True, False):
        for layer in engine.local_layers().values():
            layer.requires_grad_(not (frozen and engine.stage_id == 0))
        losses.append(float(engine.train_batch(batches)))
        seen.append(engine.order == order_of("1f1b", run.micro_batches, run.num_stages))
        ordering.adopt(order, engine.partition)
        losses += [float(engine.train_batch(batches)) for _ in range(2)]
        seen.append(engine.order == (order or order_of("1f1b", run.micro_batches, run.num_stages)))
    return losses, digest(engine), seen


def test_thawed_layers_can_run_an_order_in_which_they_were_frozen() -> None:
    """It is dropped where layers change, but what was measured may lag behind, so that it is planned once more."""
    config = {**ADAMW, **CLIP, "dynamic_pipeline": PROFILED}
    run = Run(3, 1, micro_batches=6, config=config)
    usual, planned = (run_ranks(thaw, 3, run, order, timeout_s=60) for order in (None, FROZEN))
    assert planned == usual and all(seen == [True] * 4 for *_, seen in planned)


SPLIT = plan_order(Workload(
    [1.0, 1.3, 1.1], [2.0, 2.2, 2.0], 6, weight_s=[1.0] * 3, activation_bytes=[1, 1, 1],
)).order  # fmt: skip


def freeze(_rank: int, run: Run, order: Order | None) -> tuple[list[float], dict[str, str], list[bool]]:
    """Under one order: the middle is frozen, then a prefix, too; then all but the last stage is thawed again."""
    engine = make_engine(run)
    batches, losses, seen = data(0, run.micro_batches), [float(engine.train_batch(data(0, run.micro_batches)))], []
    ordering = engine.dynamic.balancer.ordering
    ordering.is_due = lambda: False
    ordering.adopt(order, engine.partition)
    for frozen in ((), (1,), (0, 1), (2,)):
        for layer in engine.local_layers().values():
            layer.requires_grad_(engine.stage_id not in frozen)
        losses += [float(engine.train_batch(batches)) for _ in range(2)]
        seen.append(engine.order == SPLIT)
    return losses, digest(engine), seen


def test_an_order_goes_on_where_layers_are_frozen_and_is_dropped_where_they_are_thawed() -> None:
    """Frozen layers compute and hold less; thawed ones might hold too much under it."""
    assert any(SPLIT.split(stage) for stage in range(3))
    config = {**ADAMW, **CLIP, "dynamic_pipeline": PROFILED}
    run = Run(3, 1, micro_batches=6, config=config)
    usual, planned = (run_ranks(freeze, 3, run, order, timeout_s=60) for order in (None, SPLIT))
    for (losses, weights, seen), (usual_losses, usual_weights, _) in zip(planned, usual, strict=True):
        assert losses == usual_losses and weights == usual_weights
        assert seen == [True, True, True, False]


def by_itself(_rank: int, run: Run) -> tuple[list[float], Any, list[int], bool]:
    trials: list[int] = []
    kept = Ordering.next

    def noting(self: Ordering, *, is_profiled: bool) -> Order | None:
        order = kept(self, is_profiled=is_profiled)
        if order is not self.order:
            trials.append(engine.dynamic.num_batches)
        return order

    with patch.object(Ordering, "next", noting):
        engine = make_engine(run)
        engine.dynamic.balancer.ordering.is_due = lambda: False  # a planned order that splits spares the trial
        losses = train(engine, run)
    weights = [layer.weight_s for layer in engine.dynamic.balancer.smoothed().layers]
    return losses, digest(engine), trials, all(weights[1:]) and len(engine.dynamic.balancer.ordering._halves._costs) > 1


def test_a_controller_tries_halves_by_itself() -> None:
    """Until an order is planned, two profiled batches split every other backward: halves and their cost are known."""
    found = {}
    for schedule in ("1f1b", "auto"):
        config = {**ADAMW, **CLIP, "dynamic_pipeline": {**PROFILED, "schedule": schedule}}
        found[schedule] = run_ranks(by_itself, 3, Run(3, 6, config=config))
    for usual, auto in zip(found["1f1b"], found["auto"], strict=True):
        assert auto[:2] == usual[:2]
        assert (usual[2], usual[3]) == ([], False) and (auto[2][:2], auto[3]) == ([1, 2], True)
