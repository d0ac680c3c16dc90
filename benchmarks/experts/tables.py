"""Rows of the tables: simulated settings, next to what the paper says of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any

from benchmarks.experts import published
from benchmarks.experts.contenders import (
    ALL,
    FASTERMOE,
    LANES,
    PRO_PROPHET,
    REROUTED,
    STATIC,
    TOP_2,
    TOP_3,
    Tally,
    run,
)
from benchmarks.experts.settings import CLUSTERS, KEPT, Setting
from benchmarks.paper.report import Report
from benchmarks.record import table
from scenarios.moe.placing.constants import Agg

SIZES: tuple[tuple[int, int, Agg], ...] = (
    (4, 4, "sums"), (4, 32, "chain"), (8, 8, "sums"), (16, 16, "sums"), (16, 16, "chain"), (32, 32, "sums"),
)  # fmt: skip
"""Ranks, experts, and how gradients come home, of the large table."""
SHOWN = tuple(name for name in ALL if name != STATIC)


@dataclass(frozen=True)
class Size:
    """How much of each setting is simulated.

    Args:
        layers: drawn; each has an order of experts and a drift of its own.
        batches: of each.
        ranks: of the large table.
        models: of the large table.
        processes: that simulate at the same time.
    """

    layers: int
    batches: int
    ranks: tuple[int, ...]
    models: tuple[str, ...]
    processes: int


@dataclass(frozen=True)
class Row:
    """A setting and what came out; of a layer's seconds unless it says iteration.

    Args:
        setting: what was simulated.
        overlapped: whether Trans and Agg run beside computation, and planners know.
        layer: speedup over static by contender.
        iteration: the same of whole blocks: the layer and what is not experts.
        balance: busiest rank over the mean, mean of layers and batches.
        plan_ms: CPU milliseconds of planning a layer.
        copies: of the rank with most, mean.
        hidden: share of Trans and Agg that nobody waits for.
    """

    setting: Setting
    overlapped: bool
    layer: dict[str, float]
    iteration: dict[str, float]
    balance: dict[str, float]
    plan_ms: dict[str, float]
    copies: dict[str, float]
    hidden: dict[str, float]

    def over_rivals(self, name: str) -> float:
        """A contender's layers over those of the faster of FasterMoE and Pro-Prophet; all plan from the batch before.

        Args:
            name: of the contender.
        """
        return self.layer[name] / max(self.layer[FASTERMOE], self.layer[PRO_PROPHET])

    def plain(self) -> dict[str, Any]:
        """For JSON, rounded."""
        return {
            name: {key: round(each, 3) if isinstance(each, float) else each for key, each in value.items()}
            if isinstance(value, dict) else value
            for name, value in asdict(self).items()
        }  # fmt: skip


def short(row: dict[str, Any]) -> dict[str, Any]:
    """What the large table keeps of a row in JSON.

    Args:
        row: of :meth:`Row.plain`.
    """
    kept = {name: row[name] for name in ("setting", "overlapped", "layer")}
    kept["setting"] = " ".join(str(value) for value in row["setting"].values())
    for name in ("balance", "plan_ms", "copies", "hidden"):
        kept[name] = {who: row[name][who] for who in (STATIC, LANES)}
    return kept


def simulated(case: tuple[Setting, bool], *, size: Size, who: tuple[str, ...] = ALL) -> Row:
    """Simulate a setting.

    Args:
        case: the setting, and whether Trans and Agg run beside computation.
        size: how much of it.
        who: of the contenders; static is among them.
    """
    setting, overlapped = case
    found = run(setting, layers=size.layers, batches=size.batches, overlapped=overlapped, who=who)
    constants = setting.constants()
    count = len(found[STATIC].blocking_s)
    rest_s = count * (constants.rest_forward_s + constants.rest_backward_s)

    def took(tally: Tally) -> float:
        return sum(tally.overlapped_s if overlapped else tally.blocking_s)

    seconds = {name: took(tally) for name, tally in found.items()}
    return Row(
        setting, overlapped, {name: seconds[STATIC] / each for name, each in seconds.items()},
        {name: (seconds[STATIC] + rest_s) / (each + rest_s) for name, each in seconds.items()},
        {name: fmean(tally.balance) for name, tally in found.items()},
        {name: 1e3 * fmean(tally.plan_s) for name, tally in found.items()},
        {name: fmean(tally.copies) for name, tally in found.items()},
        {name: tally.hidden_s / tally.transfers_s if tally.transfers_s else 1.0 for name, tally in found.items()},
    )  # fmt: skip


def all_of(cases: Sequence[Any], call: Callable[[Any], Any], processes: int) -> Iterator[Any]:
    """Results in order.

    Args:
        cases: what to call with.
        call: can be pickled.
        processes: at the same time.
    """
    if processes == 1:
        yield from map(call, cases)
        return
    with ProcessPoolExecutor(processes) as pool:
        yield from pool.map(call, cases)


def _way(agg: Agg) -> str:
    """How gradients come home, in words."""
    return "around the ring" if agg == "chain" else "by holder"


def _cells(values: dict[str, float], names: Iterable[str]) -> list[str]:
    return [f"{values[name]:.2f}" for name in names]


def beside_the_paper(report: Report, size: Size) -> None:
    """Tables IV and V.

    Args:
        report: to fill and save.
        size: how much of each setting.
    """
    there = ((published.TABLE_4, "HPNV", 16, 1024), (published.TABLE_5, "LPWNV", 8, 512))
    cases = [
        (Setting(model, cluster, ranks, ranks, k, tokens, agg="sums"), True)
        for told, cluster, ranks, tokens in there
        for k, model in told
    ]
    rows, values = [], []
    for row in all_of(cases, partial(simulated, size=size), size.processes):
        setting = row.setting
        told = published.TABLE_4 if setting.cluster == "HPNV" else published.TABLE_5
        paper = told[setting.top_k, setting.model]
        rows.append([
            "IV, HPNV, 16" if setting.cluster == "HPNV" else "V, LPWNV, 8", str(setting.top_k), setting.model,
            *(f"{speedup:.2f}" for speedup in paper), *_cells(row.iteration, SHOWN),
            f"{row.balance[STATIC]:.2f}", f"{row.balance[LANES]:.2f}", f"{row.plan_ms[LANES]:.0f}",
        ])  # fmt: skip
        values.append(row.plain())
    head = [
        "table, cluster, GPUs", "k", "model", "paper: FasterMoE", "paper: Pro-Prophet", *SHOWN,
        "busiest rank over mean: static", "lanes", "planning with lanes, ms",
    ]  # fmt: skip
    report.table, report.values = table(head, rows), values
    report.text = (
        "Speedup of an iteration (experts and the rest of each block) over static expert parallelism, slow drift, "
        "Trans and Agg beside computation for all. The paper's columns are speedups over DeepSpeed-MoE, measured on "
        "GPUs (section VI-A)."
    )
    report.notes += NOTES
    report.save()


def large(report: Report, size: Size) -> None:
    """All models, k, drifts and numbers of ranks, blocking and overlapped.

    Args:
        report: to fill and save.
        size: how much of each setting, and which.
    """
    settings = [
        Setting(model, "HPWNV", ranks, experts, k, 1024, drift, agg)
        for ranks, experts, agg in SIZES if ranks in size.ranks
        for model in size.models
        for k in (1, 2) for drift in KEPT
    ]  # fmt: skip
    cases = [(setting, overlapped) for setting in settings for overlapped in (False, True)]
    rows, values, found = [], [], []
    for row in all_of(cases, partial(simulated, size=size), size.processes):
        setting = row.setting
        rows.append([
            f"{setting.num_ranks} x {setting.num_experts // setting.num_ranks}",
            _way(setting.agg), setting.model, str(setting.top_k), setting.drift,
            "overlapped" if row.overlapped else "blocking", *_cells(row.layer, SHOWN), f"{row.over_rivals(LANES):.2f}",
            f"{row.balance[STATIC]:.2f}", f"{row.balance[LANES]:.2f}", f"{row.copies[LANES]:.1f}",
            f"{row.hidden[LANES]:.0%}" if row.overlapped else "", f"{row.plan_ms[PRO_PROPHET]:.1f}",
            f"{row.plan_ms[LANES]:.0f}", f"{row.plan_ms[REROUTED] - row.plan_ms[LANES]:.1f}",
        ])  # fmt: skip
        values.append(short(row.plain()))
        found.append(row)
    head = [
        "ranks x experts at home", "Agg", "model", "k", "drift", "transfers", *SHOWN, "lanes over the faster rival",
        "busiest rank over mean: static", "lanes", "copies of the fullest rank", "hidden", "planning: Pro-Prophet, ms",
        "lanes, ms", "re-routing, ms",
    ]  # fmt: skip
    report.table, report.values = table(head, rows), values
    report.text = "Speedup of a MoE layer over static expert parallelism, cluster HPWNV, 1024 tokens a rank."
    report.notes += [
        _never_slower("lanes re-routed, as it trains,", [row.over_rivals(REROUTED) for row in found]),
        _never_slower("lanes without re-routing", [row.over_rivals(LANES) for row in found]),
        f"The paper, HPWNV, 16 and 32 GPUs (Figure 10), iterations over DeepSpeed-MoE: {published.FIGURE_10[1][0]}x at "
        f"k = 1, {published.FIGURE_10[2][0]}x at k = 2; over FasterMoE {published.FIGURE_10[1][1]}x and "
        f"{published.FIGURE_10[2][1]}x. Single layers of M (Figure 11): {published.FIGURE_11[0]}x and "
        f"{published.FIGURE_11[1]}x.",
        *NOTES,
    ]
    report.save()


def _never_slower(who: str, ratios: Sequence[float]) -> str:
    lost = [ratio for ratio in ratios if ratio < 0.9995]
    least = f"; smallest ratio {min(lost):.4f}." if lost else "."
    count = f"{len(ratios) - len(lost)} of {len(ratios)} rows"
    return f"{who} is at least as fast as FasterMoE and Pro-Prophet in {count}{least}"


def ablation(report: Report, size: Size) -> None:
    """Planner, scheduler, both joined (Figure 14), and simple policies (Figure 15).

    Args:
        report: to fill and save.
        size: how much of each setting.
    """
    rows, values = [], []
    cases = [(k, agg) for k in (1, 2) for agg in ("sums", "chain")]
    for (k, agg), (blocking, overlapped) in zip(
        cases, all_of(cases, partial(_parts, size=size), size.processes), strict=True
    ):
        for name in (PRO_PROPHET, LANES):
            planner = sum(blocking[STATIC].blocking_s) / sum(blocking[name].blocking_s)
            scheduler = sum(blocking[name].blocking_s) / sum(blocking[name].overlapped_s)
            joined = sum(blocking[name].overlapped_s) / sum(overlapped[name].overlapped_s)
            paper = published.FIGURE_14[k] if name == PRO_PROPHET else (published.UNKNOWN,) * 3
            simple = [sum(blocking[top].blocking_s) / sum(blocking[name].blocking_s) for top in (TOP_2, TOP_3)]
            figures = published.FIGURE_15[k] if name == PRO_PROPHET else (published.UNKNOWN,) * 2
            cells = [planner, scheduler, joined, planner * scheduler * joined, *simple]
            rows.append([
                str(k), _way(agg), name, *(f"{each:.2f}" for each in cells),
                *(str(each) for each in (*paper, *figures)),
            ])  # fmt: skip
            values.append({"k": k, "agg": agg, "planner": name, "speedups": [round(each, 3) for each in cells]})
    head = [
        "k", "Agg", "planner", "planner", "scheduler on top", "joined on top", "all three", "over 2 fullest to all",
        "over 3 fullest to all", "paper: planner", "paper: scheduler", "paper: joined", "paper: over 2 fullest",
        "paper: over 3 fullest",
    ]  # fmt: skip
    report.table, report.values = table(head, rows), values
    report.text = (
        "Model M, HPWNV, 16 ranks, slow drift, seconds of MoE layers. *Planner*: planned and run with transfers in the "
        "way, over static. *Scheduler on top*: the same placements, Trans and Agg beside computation. *Joined*: "
        "planned by equation 8. The paper's figures (14 and 15, section VI-C) are of iterations."
    )
    report.notes += NOTES
    report.save()


def _parts(case: tuple[int, Any], *, size: Size) -> tuple[dict[str, Tally], dict[str, Tally]]:
    k, agg = case
    setting = Setting("M", "HPWNV", 16, 16, k, 1024, agg=agg)
    who = (STATIC, PRO_PROPHET, LANES, TOP_2, TOP_3)
    return (
        run(setting, layers=size.layers, batches=size.batches, overlapped=False, who=who),
        run(setting, layers=size.layers, batches=size.batches, overlapped=True, who=who),
    )


def _speeds() -> str:
    words = [
        f"{name} {cluster.flops / 1e12:.0f} TFLOP/s, {1e-9 / cluster.byte_s(16):.1f} GB/s a GPU on 16"
        for name, cluster in CLUSTERS.items()
    ]
    return "; ".join(words)


NOTES = [
    f"Constants that the paper does not give are ours (benchmarks/experts/settings.py): {_speeds()}; fp32; sequences "
    "of 1024; Zipf 1.1; drift. Embedding, head, optimizer and data parallelism of the rest take no time; DS and DM are "
    "layers of S and M with draws of their own. Trust the order of contenders, not the factors.",
    "Everybody plans from the batch before, except *FasterMoE, own counts*, which decides in the batch, as published, "
    "and *lanes re-routed*, which spreads a batch's own rows over the copies planned before. Planning itself takes no "
    "time here; its CPU milliseconds are in a column. n of Pro-Prophet is the best of eight.",
    "*Agg by holder*: every holder adds its lanes and forwards, as the papers do. *Around the ring*: the running sum "
    "that gives the same bits whatever the placement, for everybody.",
    "*Tutel's switch* is its published rule in our words (benchmarks/experts/contenders.py), not its code.",
]
