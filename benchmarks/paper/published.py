"""What the paper says, figure by figure, with where it stands and what it is compared with there.

Wahib, Soyturk, Unat, "Balanced and Elastic End-to-end Training of Dynamic LLMs", SC'25, arXiv:2505.14864 ("DynMo");
and the supplement of an earlier version of the same work ("DynPipe"). Nothing here is ours. Figures of bar charts are
the labels printed in them; which depth a label belongs to follows the order of the bars. Where the paper
contradicts itself, :data:`CONTRADICTIONS` says so, and no table resolves it.
"""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN = "n/a"
NOT_GIVEN = "not given"

CHANGING_EVERY_BATCH = ("moe", "mod", "sparse_attention")
"""Scenarios that the paper balances in every iteration (Figure 4)."""
DEPTHS = (24, 32, 40, 48)

STATIC, DENSE, EGERIA = "static Megatron-LM, DeepSpeed", "dense attention", "Egeria"
NO_EXIT, TUTEL = "no early exit", "Tutel"


@dataclass(frozen=True)
class Factor:
    """A speedup.

    Args:
        scenario: one of the six.
        model: its blocks, or its name.
        factor: throughput over the baseline's.
        baseline: what it is over.
        source: figure or section.
    """

    scenario: str
    model: int | str
    factor: float
    baseline: str
    source: str


def _by_depth(scenario: str, factors: tuple[float, ...], baseline: str) -> tuple[Factor, ...]:
    return tuple(
        Factor(scenario, depth, factor, baseline, "DynMo, Figure 3")
        for depth, factor in zip(DEPTHS, factors, strict=True)
    )


FACTORS = (
    Factor("moe", "Mixtral 8x7B", 1.21, STATIC, "DynMo, Figure 3"),
    Factor("moe", "LLaMA-MoE-3.5B", 1.23, STATIC, "DynMo, Figure 3"),
    Factor("moe", "Mixtral 8x7B", 1.18, TUTEL, "DynMo, section 5.1"),
    Factor("moe", "LLaMA-MoE-3.5B", 1.21, TUTEL, "DynMo, section 5.1"),
    *_by_depth("pruning", (2.32, 2.78, 2.84, 2.61), STATIC),
    *_by_depth("freezing", (1.36, 1.48, 1.58, 1.69), EGERIA),
    *_by_depth("sparse_attention", (2.71, 3.90, 4.02, 3.73), DENSE),
    *_by_depth("early_exit", (3.07, 2.70, 2.39, 4.83), NO_EXIT),
    *_by_depth("mod", (1.17, 1.17, 1.16, 1.16), STATIC),
)
"""Figure 3: best of the four balancers, overhead included, 720 GPUs (MoE and MoD: 128)."""

LARGEST = {
    "moe": 1.23, "pruning": 3.18, "freezing": 2.23, "sparse_attention": 4.02, "early_exit": 4.52, "mod": 1.17,
}
"""The abstract's and section 5.1's "up to"; baselines as in Figure 3."""

IDLENESS = {
    "moe": "about 25% (S-BASE and auxiliary loss)", "pruning": "at 90% almost 5 times the dense model's",
    "freezing": "about 40% (Egeria, AutoFreeze)", "sparse_attention": "about 4 times dense attention's",
    "early_exit": "up to 5 times that without exits (CALM, ADP-C)", "mod": "about 18%",
}
"""Figure 1: idle share of a GPU under a static cut, by an almost zero-bubble schedule."""
IDLENESS_LEFT = {"moe": "8%", "mod": "4%"}
"""Section 5.1: what is left of it with DynMo."""

INTERVALS = {
    "pruning": (2300, 4400), "freezing": (300, 300), "sparse_attention": (1, 1), "early_exit": (100, 100),
    "mod": (1, 1), "moe": (1, 1),
}
"""Iterations between two decisions (Figure 4), least and most over the depths."""

OVERHEAD = {
    "pruning": ("<0.1%",) * 4, "freezing": ("<0.1%",) * 4, "sparse_attention": ("2%", "7%", "8%", "13%"),
    "early_exit": ("<0.1%", "0.1%", "0.2%", "0.3%"), "mod": ("2%", "5%", "5%", "7%"),
}
"""Figure 4: profiling, deciding and moving as a share of training, for 24, 32, 40 and 48 layers."""
OVERHEAD_MOE = {"Mixtral 8x7B": "5%", "LLaMA-MoE-3.5B": "4%"}

BALANCERS = ("partition:time", "partition:parameters", "diffusion:time", "diffusion:parameters")
ITERATIONS_BY_DEPTH = {
    24: (25, 61, 12, 18), 32: (9, 55, 7, 20), 40: (12, 56, 11, 18), 48: (13, 54, 4, 13), 56: (14, 59, 9, 13),
}
"""DynPipe, Table 1: "load balancing overhead in terms of number of training iterations", in :data:`BALANCERS`' "
"order."""


@dataclass(frozen=True)
class OneNode:
    """A line of DynPipe's Table 2: pruning to 90% on one node, samples a second.

    Args:
        megatron: static.
        diffusion: by time.
        partition: by time.
        speedup: of the better one, as printed.
    """

    megatron: float
    diffusion: float
    partition: float
    speedup: float


ONE_NODE = {
    (24, 2): OneNode(10.67, 12.38, 12.88, 1.20), (24, 4): OneNode(20.23, 24.86, 24.82, 1.22),
    (24, 8): OneNode(37.253, 46.939, 45.071, 1.26), (32, 2): OneNode(8.28, 10.35, 10.12, 1.25),
    (32, 4): OneNode(15.69, 19.06, 19.76, 1.26), (32, 8): OneNode(30.809, 39.899, 37.933, 1.29),
    (40, 2): OneNode(7.14, 8.84, 9.13, 1.28), (40, 4): OneNode(12.84, 16.11, 16.82, 1.31),
    (40, 8): OneNode(26.425, 35.262, 33.296, 1.33), (48, 4): OneNode(10.89, 14.70, 14.54, 1.35),
    (48, 8): OneNode(23.126, 31.724, 29.711, 1.37), (56, 8): OneNode(19.126, 26.724, 25.711, 1.39),
}
"""By layers and GPUs."""
OUT_OF_MEMORY = ((48, 2), (56, 2), (56, 4))
"""Lines of Table 2 that ran out of memory."""

SHRINKS_AT = {
    24: (1, 2300, 6700, 8500), 32: (1, 3000, 6900, 8500), 40: (1, 3600, 6900, 9000), 48: (1, 4400, 7700),
    56: (1, 5800),
}
"""Figure 4, left: iteration from which 8, 6, 4 and 2 GPUs hold the model that is being pruned (56: a fifth column)."""
AVERAGE_GPUS = {24: 5.4, 32: 5.7, 40: 5.9, 48: 6.4, 56: 7.2}
"""Figure 4, left: mean over 10,000 iterations, of 8."""
AVERAGE_GPUS_TEXT = 5.8

CONTRADICTIONS = (
    "Pruning: Figure 3's labels end at 2.84; abstract and text say up to 3.18.",
    "Freezing: Figure 3's labels end at 1.69; the abstract says up to 2.23. Removing all of the 40% idleness of "
    "Figure 1 gives at most 1 / (1 - 0.40) = 1.67.",
    "Early exit: Figure 3's largest label is 4.83, the abstract's largest factor 4.52. The text says more than 4 on "
    "average; the labels' mean is 3.25.",
    "Section 3.3.1 calls the overhead single-digit; Figure 4 has 13% (sparse attention, 48 layers).",
    "Re-packing brings 4 to 11% on top (section 3.4.2), or 4 to 11% of the whole gain (section 5.1).",
    "Nodes have 4 GPUs in the text, which makes 64 of the 16 and 360 of the 90 nodes, not 128 and 720; Figure 4 has 8.",
    "Figure 3's caption names 24 stages. Megatron-LM needs as many blocks on every stage: 32 and 40 do not divide by "
    "24, all depths divide by 8; the supplement has 90 replicas of 8 stages for 720 GPUs.",
    "With at most n whole blocks on a stage, another cut of whole blocks lowers the slowest stage at most n times. "
    "On 24 stages n is 1 (24 blocks) or 2 (32 to 48), with fill and drain at most a factor of 2.5: the larger "
    "factors of pruning, sparse attention and early exit cannot be balancing alone on the caption's pipeline; on 8 "
    "stages they can.",
    "Pruning begins at iteration 3,000, so over 10,000 iterations no factor above 10/4 = 2.5 is possible while the "
    "first 4,000 are dense and balanced; 2.61 to 3.18 must be the pruned phase alone. The paper does not say.",
    "Figure 4: 24 layers shrink to 6 GPUs at iteration 2,300, before pruning begins at 3,000.",
    "Figure 4's average numbers of GPUs for 24 layers: 5.4 printed, 5.50 from the iterations beside it.",
    "Three pruning levels are listed, 52%, 79% and 90%; Eq. 3 with its own settings has a fourth step, 88.6%.",
    "Frozen layers count as no load (section 2.3), although they still run forward.",
    "Section 2.1 adds up the tokens of a worker's experts. Where a stage holds all experts of its blocks, that sum "
    "is the same whatever the router does, and the equation knows no imbalance between stages.",
    "Lemma 2's S is the number of stages in the statement; in the proof it bounds the largest gap of loads.",
    "The overhead in iterations (DynPipe, Table 1) is not said to be of one re-balance or of all of a run.",
)  # fmt: skip


def factors(scenario: str, blocks: int | None = None) -> list[Factor]:
    """What Figure 3 and section 5.1 have of a scenario.

    Args:
        scenario: one of the six.
        blocks: of the model; ``None``, or a depth that is not in the figure: all.
    """
    found = [factor for factor in FACTORS if factor.scenario == scenario]
    return [factor for factor in found if factor.model == blocks] or found


def speedup(scenario: str, blocks: int | None = None) -> str:
    """A cell: the paper's factors, each with what it is over.

    Args:
        scenario: one of the six.
        blocks: of the model.
    """
    found = factors(scenario, blocks)
    baselines = list(dict.fromkeys(factor.baseline for factor in found))
    parts = [
        f"{_range([factor.factor for factor in found if factor.baseline == baseline])} over {baseline}"
        for baseline in baselines
    ]
    return "; ".join(parts) or UNKNOWN


def _range(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}x" if low == high else f"{low:.2f} to {high:.2f}x"


def is_over_static(scenario: str) -> bool:
    """Whether Figure 3's factors are over static partitions of the same changing model, as ours are.

    Args:
        scenario: one of the six.
    """
    return any(factor.scenario == scenario and factor.baseline == STATIC for factor in FACTORS)


def overhead(scenario: str, blocks: int | None = None) -> str:
    """A cell: Figure 4's share.

    Args:
        scenario: one of the six.
        blocks: of the model; a depth that is not in the figure: all depths.
    """
    if scenario == "moe":
        return ", ".join(f"{share} ({model})" for model, share in OVERHEAD_MOE.items())
    shares = OVERHEAD.get(scenario)
    if shares is None:
        return UNKNOWN
    by_depth = dict(zip(DEPTHS, shares, strict=True))
    if blocks in by_depth:
        return by_depth[blocks]
    return shares[0] if len(set(shares)) == 1 else f"{shares[0]} to {shares[-1]} (24 to 48 layers)"


def idleness(scenario: str) -> str:
    """A cell: Figure 1's idleness, and what section 5.1 says is left.

    Args:
        scenario: one of the six.
    """
    left = f"; with DynMo {IDLENESS_LEFT[scenario]}" if scenario in IDLENESS_LEFT else ""
    return f"{IDLENESS[scenario]}{left}" if scenario in IDLENESS else UNKNOWN


def iterations(method: str, blocks: int) -> str:
    """A cell: DynPipe's Table 1.

    Args:
        method: one of :data:`BALANCERS`.
        blocks: of the model.
    """
    if method not in BALANCERS or blocks not in ITERATIONS_BY_DEPTH:
        return NOT_GIVEN
    return str(ITERATIONS_BY_DEPTH[blocks][BALANCERS.index(method)])


def interval(scenario: str) -> int:
    """Iterations between two of the paper's decisions; the shortest where it gives a range.

    Args:
        scenario: one of the six, or one that does not change.
    """
    return INTERVALS.get(scenario, (1, 1))[0]
