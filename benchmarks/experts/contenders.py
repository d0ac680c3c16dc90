"""Who is compared, and what a layer takes under each, batch by batch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from benchmarks.experts.settings import Setting
from scenarios.moe.placing import Lanes, LayerModel, balance, plan, reroute

STATIC, FASTERMOE, FASTERMOE_OWN = "static", "FasterMoE", "FasterMoE, own counts"
PRO_PROPHET, LANES, REROUTED = "Pro-Prophet", "lanes", "lanes re-routed"
LOCAL, TUTEL, TOP_2, TOP_3 = "all local", "Tutel's switch (ours)", "2 fullest to all", "3 fullest to all"
ALL = (STATIC, FASTERMOE, FASTERMOE_OWN, PRO_PROPHET, LANES, REROUTED, LOCAL, TUTEL)


def switched(loads: np.ndarray, model: LayerModel) -> Lanes:
    """Tutel's adaptive parallelism, as its paper describes it; the words are theirs, the code and its reading ours.

    Hwang et al., "Tutel", section 4.1: the same layout serves data and expert parallelism, and the one that
    communicates less is switched to. With as many experts as ranks or more these are all local (weights gathered,
    gradients scattered) and static.

    Args:
        loads: of the last batch, ``[R, E]``.
        model: for the seconds of what is communicated; computing is not looked at.
    """
    static, local = Lanes.static(*loads.shape), Lanes.local(*loads.shape)
    told = model.predict(local, loads)
    return local if told.trans_s + told.agg_s < model.predict(static, loads).all_to_all_s else static


def fullest_to_all(loads: np.ndarray, count: int) -> Lanes:
    """The paper's simple policy of Figure 15: the fullest experts are local everywhere.

    Args:
        loads: of the last batch, ``[R, E]``.
        count: how many experts.
    """
    owner = np.array(Lanes.static(*loads.shape).owner)
    for expert in np.argsort(-loads.sum(axis=0), kind="stable")[:count]:
        owner[:, expert] = np.arange(len(loads))
    return Lanes(tuple(map(tuple, owner.tolist())))


PLANS: dict[str, Callable[[np.ndarray, LayerModel], Lanes]] = {
    STATIC: lambda loads, model: plan("static", loads, model),
    FASTERMOE: lambda loads, model: plan("fastermoe", loads, model),
    PRO_PROPHET: lambda loads, model: plan("pro_prophet", loads, model),
    LOCAL: lambda loads, model: plan("local", loads, model),
    TUTEL: switched,
    TOP_2: lambda loads, model: fullest_to_all(loads, 2),
    TOP_3: lambda loads, model: fullest_to_all(loads, 3),
}


@dataclass
class Tally:
    """What a contender's layers took, over layers and batches.

    Args:
        blocking_s: with Trans and Agg in the way, seconds.
        overlapped_s: with them beside computation, seconds.
        hidden_s: seconds of Trans and Agg that nobody waited for, where they ran beside computation.
        transfers_s: seconds of Trans and Agg.
        balance: busiest rank over the mean, by layer and batch.
        copies: of the rank with most, by layer and batch.
        plan_s: CPU seconds of planning (and re-routing), by layer and batch.
    """

    blocking_s: list[float] = field(default_factory=list)
    overlapped_s: list[float] = field(default_factory=list)
    hidden_s: float = 0.0
    transfers_s: float = 0.0
    balance: list[float] = field(default_factory=list)
    copies: list[int] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)

    def add(self, sent: Lanes, run: Lanes, loads: np.ndarray, model: LayerModel, plan_s: float) -> None:
        """Count a batch.

        Args:
            sent: the placement whose weights were transferred.
            run: the placement that ran; another one if rows were re-routed.
            loads: what was routed, ``[R, E]``.
            model: seconds.
            plan_s: CPU seconds of planning.
        """
        told, trans = model.predict(run, loads), model.predict(sent, loads).trans_s
        hidden = min(trans, told.forward_s + model.constants.rest_forward_s)
        blocking = told.all_to_all_s + told.compute_s + trans + told.agg_s
        self.blocking_s.append(blocking)
        self.overlapped_s.append(blocking - hidden - told.hidden_agg_s)
        self.hidden_s += hidden + told.hidden_agg_s
        self.transfers_s += trans + told.agg_s
        self.balance.append(balance(run, loads))
        self.copies.append(max(len(sent.copies(rank)) for rank in range(sent.num_ranks)))
        self.plan_s.append(plan_s)


def run(
    setting: Setting, *, layers: int, batches: int, overlapped: bool, who: tuple[str, ...] = ALL
) -> dict[str, Tally]:
    """Simulate some layers for some batches; each is planned from the batch before.

    Args:
        setting: what is trained where.
        layers: how many are drawn.
        batches: how many of each are counted, after two that are only planned from.
        overlapped: whether planners are told that transfers run beside computation.
        who: of the contenders.

    Returns:
        By contender.
    """
    model = LayerModel(setting.constants(), overlapped)
    found = {name: Tally() for name in who}
    for layer in range(layers):
        drawn = list(setting.loads(layer, batches + 2))
        for earlier, before, loads in zip(drawn, drawn[1:], drawn[2:], strict=False):
            planned: dict[str, tuple[Lanes, float]] = {}
            for name in who:
                if name == LANES:
                    planned[name] = _timed(
                        lambda known=before, earlier=earlier: plan("lanes", known, model, earlier=earlier)
                    )
                elif name in PLANS:
                    planned[name] = _timed(lambda name=name, known=before: PLANS[name](known, model))
            for name in who:
                if name == REROUTED:
                    sent, plan_s = planned[LANES]
                    lanes, more_s = _timed(lambda sent=sent, known=loads: reroute(sent, known, model))
                    found[name].add(sent, lanes, loads, model, plan_s + more_s)
                elif name == FASTERMOE_OWN:  # decided after the router ran, in the batch itself, as published
                    lanes, plan_s = _timed(lambda known=loads: PLANS[FASTERMOE](known, model))
                    found[name].add(lanes, lanes, loads, model, plan_s)
                else:
                    lanes, plan_s = planned[name]
                    found[name].add(lanes, lanes, loads, model, plan_s)
    return found


def _timed(call: Callable[[], Lanes]) -> tuple[Lanes, float]:
    before = time.process_time()
    lanes = call()
    return lanes, time.process_time() - before
