"""What the paper says: only figures that are known, each with its setting; everything else is "n/a".

Wahib, Soyturk, Unat, "Balanced and Elastic End-to-end Training of Dynamic LLMs", SC'25, arXiv:2505.14864.
"""

from __future__ import annotations

UNKNOWN = "n/a"

SPEEDUP_SETTING = (
    "the paper's abstract: largest end-to-end speedup of any GPT, depth and pipeline over static training "
    "(Megatron-LM, DeepSpeed), on GPUs; per depth and stage count: n/a"
)
LARGEST_SPEEDUP = {
    "moe": 1.23, "pruning": 3.18, "freezing": 2.23, "sparse_attention": 4.02, "early_exit": 4.52, "mod": 1.17,
}

OVERHEAD_SETTING = "Figure 4: rebalancing where the model changes in every batch, as a share of training time"
OVERHEAD_EVERY_BATCH = "2% to 13%"
CHANGING_EVERY_BATCH = ("moe", "mod", "sparse_attention")

ITERATIONS_SETTING = "DynPipe, Table 1: training iterations that one re-balance costs"
ITERATIONS_OF_ONE_REBALANCE = "4 to 61"


def largest_speedup(scenario: str) -> str:
    """The abstract's figure for a scenario, or "n/a".

    Args:
        scenario: one of the six.
    """
    return f"up to {LARGEST_SPEEDUP[scenario]:.2f}x" if scenario in LARGEST_SPEEDUP else UNKNOWN


def overhead(scenario: str) -> str:
    """Figure 4's range where it applies, or "n/a".

    Args:
        scenario: one of the six.
    """
    return OVERHEAD_EVERY_BATCH if scenario in CHANGING_EVERY_BATCH else UNKNOWN
