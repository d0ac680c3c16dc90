"""What the paper says: its figures, each with its section; nothing else.

"Pro-Prophet: A Systematic Load Balancing Method for Efficient Parallel Training of Large-scale MoE Models", evaluated
on GPUs, in the first 100 iterations, one expert a GPU. Speedups are of whole iterations over DeepSpeed-MoE, which
differs from static expert parallelism in more than the placement.
"""

from __future__ import annotations

UNKNOWN = "n/a"

# Section VI-A, Table IV: 4 HPNV nodes, 16 GPUs, 16384 tokens; (FasterMoE, Pro-Prophet) by k and model.
TABLE_4 = {
    (1, "S"): (1.63, 1.98), (1, "M"): (1.99, 2.22), (1, "L"): (1.62, 1.80), (1, "DS"): (1.34, 1.70),
    (1, "DM"): (1.68, 2.26), (2, "S"): (2.31, 2.62), (2, "M"): (1.82, 2.10), (2, "L"): (1.94, 2.23),
    (2, "DS"): (1.77, 1.94), (2, "DM"): (1.84, 2.07),
}  # fmt: skip
# Section VI-A, Table V: 2 LPWNV nodes, 8 GPUs, 4096 tokens.
TABLE_5 = {
    (1, "S"): (1.20, 1.30), (1, "M"): (1.02, 1.18), (1, "DS"): (1.12, 1.30), (1, "DM"): (0.96, 1.26),
    (2, "S"): (1.56, 1.91), (2, "M"): (1.29, 1.94), (2, "DS"): (1.44, 1.64), (2, "DM"): (1.25, 1.58),
}  # fmt: skip
# Section VI-A, Figure 10: HPWNV, 16 and 32 GPUs, all five models; Pro-Prophet over DeepSpeed-MoE, and over FasterMoE.
FIGURE_10 = {1: ("1.47 to 2.66", "up to 1.31, mean 1.19"), 2: ("1.36 to 2.37", "1.05 to 1.48")}
# Section VI-B, Figure 11: layers of M; over DeepSpeed-MoE, and over FasterMoE.
FIGURE_11 = ("1.60 to 2.25", "1.09 to 1.49")
# Section VI-C, Figure 14: M; planner over the baseline, scheduler over that, both joined (equation 8) over that.
FIGURE_14 = {1: (1.26, 1.14, 1.03), 2: (1.12, 1.01, 1.02)}
# Section VI-C, Figure 15: M; the planner over sending the 2, or 3, fullest experts to all GPUs.
FIGURE_15 = {1: ("1.77 to 1.82", "2.04 to 2.10"), 2: ("1.38 to 1.40", "1.38 to 1.40")}
