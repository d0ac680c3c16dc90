"""Load models of six kinds of dynamism (and of none), as traces made from equations: no run, no measurement.

    python -m benchmarks.traces.models --out outputs/traces

The kinds are those of Wahib, Soyturk, Unat, "Balanced and Elastic End-to-end Training of Dynamic LLMs" (SC'25,
arXiv:2505.14864), section 2. These models are *ours*: they say what a layer costs, while the paper's equations say what
its balancers count, which ``equations.py`` has. Each function names the publication that its equation is from and,
after "Assumed:", what is chosen here. Common to all: the blocks of ``blocks.py``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from benchmarks.traces.blocks import BACKWARD_FACTOR, LENGTH, make, moment, operation_shares
from benchmarks.traces.trace import Trace

DEPTHS = (24, 32, 40, 48)
NUM_BATCHES = 60


def cubic_sparsity(progress: float, final: float, initial: float = 0.0) -> float:
    """Zhu & Gupta 2018, Eq. 1: ``s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3``.

    Args:
        progress: ``(t - t_0) / (n dt)``, clipped to 0..1.
        final: ``s_f``.
        initial: ``s_i``.
    """
    left = 1.0 - min(max(progress, 0.0), 1.0)
    return final + (initial - final) * left**3


def global_magnitude(sparsity: float, sigmas: Sequence[float]) -> list[float]:
    """Sparsity of every block when the smallest weights of all blocks together are pruned.

    Block l's weights are N(0, sigma_l^2), so the threshold x solves ``mean_l erf(x / (sigma_l sqrt 2)) = s``.

    Args:
        sparsity: ``s`` of all blocks together, below 1.
        sigmas: ``sigma_l``.
    """
    low, high = 0.0, 10.0 * max(sigmas)
    for _ in range(80):
        middle = (low + high) / 2
        shares = [math.erf(middle / (sigma * math.sqrt(2))) for sigma in sigmas]
        low, high = (middle, high) if sum(shares) / len(shares) < sparsity else (low, middle)
    return [math.erf(low / (sigma * math.sqrt(2))) for sigma in sigmas]


def dense(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """No dynamism: all blocks alike, all the time; the reference, and what unequal workers are shown with.

    Args:
        depth: L.
        seed: not used, nothing is drawn.
        halves: whether attention and MLP of a block are two layers.
    """
    return make(dense, depth, [moment(0, [1.0] * depth)], -1, num_batches=NUM_BATCHES, halves=halves)


def pruning(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Gradual global magnitude pruning to 90% (Zhu & Gupta 2018, cubic schedule), in five steps.

    Assumed: weights of the first block are twice as large as those of the last, so that deeper blocks lose more;
    a weight product is dense above a density of 0.29 and linear in it below (the crossover of about 71% that
    Gale et al. 2020 report for Sputnik); scores are not pruned; the batches 10 to 40 of 60 prune.

    Args:
        depth: L.
        seed: not used, nothing is drawn.
        halves: whether attention and MLP of a block are two layers.
    """
    sigmas = [2.0 - block / max(1, depth - 1) for block in range(depth)]
    weights = sum(operation_shares()[:2])
    moments = []
    for batch in (0, 10, 16, 22, 28, 34):
        sparsity = cubic_sparsity((batch - 4) / 30 if batch else 0.0, 0.9)
        densities = [1.0 - s for s in global_magnitude(sparsity, sigmas)] if batch else [1.0] * depth
        costs = [1.0 - weights + weights * min(1.0, density / 0.29) for density in densities]
        mlps = [operation_shares()[1] * min(1.0, density / 0.29) for density in densities]
        moments.append(moment(batch, costs, parameters=densities, mlps=mlps))
    return make(pruning, depth, moments, -1, num_batches=NUM_BATCHES, halves=halves)


def freezing(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Front-to-back freezing as Egeria's (Wang et al., EuroSys 2023): a frozen module has no backward.

    Egeria freezes the first active module when its plasticity has settled. Assumed: it settles module after module,
    each of a twelfth of the blocks, every five batches from batch 6 on, until 60% are frozen; frozen blocks still run
    forward (no cached activations).

    Args:
        depth: L.
        seed: not used, nothing is drawn.
        halves: whether attention and MLP of a block are two layers.
    """
    moments = []
    for step in range(int(0.6 * 12) + 1):
        frozen = round(depth * step / 12)
        backward = [0.0 if block < frozen else BACKWARD_FACTOR for block in range(depth)]
        moments.append(moment(1 + 5 * step if step else 0, [1.0] * depth, backward, frozen=frozen))
    return make(freezing, depth, moments, -1, num_batches=NUM_BATCHES, halves=halves)


def survival(layer: int, depth: int, progress: float) -> float:
    """Share of tokens that have not left before a block; falls with depth and with training.

    A log-logistic survival function, ``S(l) = 1 / (1 + (l / l_50)^4)``: at block ``l_50`` half of the tokens have left.

    Args:
        layer: block, counted from 0.
        depth: L.
        progress: 0: nobody leaves; 1: half have left at 35% of the depth.
    """
    if progress <= 0:
        return 1.0
    half = depth * (0.35 + 1.2 * (1.0 - progress))
    return 1.0 / (1.0 + (layer / half) ** 4)


def early_exit(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Tokens leave when they are predicted confidently (CALM, Schuster et al. 2022): late blocks see few.

    Assumed: the survival function above and its drift; a block costs its share of tokens and 2% for gathering; the
    share varies among micro-batches by 10%.

    Args:
        depth: L.
        seed: not used, nothing is drawn.
        halves: whether attention and MLP of a block are two layers.
    """
    moments = []
    for batch in (0, *range(8, NUM_BATCHES, 4)):
        progress = min(1.0, batch / 40)
        costs = [min(1.0, survival(block, depth, progress) + 0.02) for block in range(depth)]
        spread = [0.1 if batch else 0.0] * depth
        moments.append(moment(batch, costs, dispersion=spread))
    return make(early_exit, depth, moments, -1, num_batches=NUM_BATCHES, halves=halves)


def moe(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Experts that tokens choose unevenly, anew in every batch (token choice, top-2 of 8, as Mixtral's).

    A layer lasts as long as its fullest expert: MLP x ``E max_e p_e`` (no token is dropped). ``p`` of a batch is
    Dirichlet(50 q_l), around the layer's own popularity ``q_l``, a Zipf law ``r^-s_l``. Assumed: ``s_l``
    uniform in 0..1, expert parallelism inside the stage, a tenth of dispersion among micro-batches.

    Args:
        depth: L.
        seed: of the draws.
        halves: whether attention and MLP of a block are two layers.
    """
    rng, experts = np.random.default_rng(seed), 8
    popularity = []
    for exponent in rng.uniform(0.0, 1.0, depth):
        ranks = np.arange(1, experts + 1) ** -exponent
        popularity.append(ranks / ranks.sum())
    mlp = operation_shares()[1]
    moments = []
    for batch in range(NUM_BATCHES):
        loads = [experts * float(rng.dirichlet(50 * q).max()) for q in popularity]
        costs = [1.0 - mlp + mlp * load for load in loads]
        moments.append(moment(batch, costs, dispersion=[0.1 * mlp] * depth, mlps=[mlp * load for load in loads]))
    return make(moe, depth, moments, seed, num_batches=NUM_BATCHES, halves=halves)


def mod(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Mixture of Depths (Raposo et al. 2024): every second block computes 12.5% of the tokens.

    Assumed: routing begins at batch 6; a learned threshold instead of a fixed top-k lets the share vary by block and
    batch, log-normally by 30%; router and gathering cost 2%.

    Args:
        depth: L.
        seed: of the draws.
        halves: whether attention and MLP of a block are two layers.
    """
    rng = np.random.default_rng(seed)
    moments = [moment(0, [1.0] * depth)]
    for batch in range(6, NUM_BATCHES):
        shares = np.minimum(1.0, 0.125 * np.exp(rng.normal(0.0, 0.3, depth)))
        costs = [min(1.0, float(share) + 0.02) if block % 2 else 1.0 for block, share in enumerate(shares)]
        moments.append(moment(batch, costs))
    # A routed block is skipped as a whole and stays one layer.
    whole = range(1, depth, 2)
    return make(mod, depth, moments, seed, num_batches=NUM_BATCHES, halves=halves, whole=whole)


def sparse_attention(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Attention within hash buckets (Pagliardini et al. 2023): the pairs that are left vary by block and batch.

    A share ``sum_b p_b^2`` of the pairs is left where bucket b holds ``p_b`` of the tokens. Assumed: 8,192 tokens,
    16 buckets, ``p`` of a block and batch is Dirichlet with a concentration of the block's own, log-uniform in
    0.1..10; sorting and ragged buckets make the pairs 1.5 times as dear; hashing begins at batch 6.

    Args:
        depth: L.
        seed: of the draws.
        halves: whether attention and MLP of a block are two layers.
    """
    rng, buckets = np.random.default_rng(seed), 16
    concentration = np.exp(rng.uniform(math.log(0.1), math.log(10.0), depth))
    scores = operation_shares(4 * LENGTH)[2]
    moments = [moment(0, [1.0] * depth, mlps=[operation_shares(4 * LENGTH)[1]] * depth)]
    for batch in range(6, NUM_BATCHES):
        left = [float((rng.dirichlet([c] * buckets) ** 2).sum()) for c in concentration]
        costs = [1.0 - scores + scores * min(1.0, 1.5 * share) for share in left]
        mlps = [operation_shares(4 * LENGTH)[1]] * depth
        moments.append(moment(batch, costs, dispersion=[0.05] * depth, mlps=mlps))
    return make(sparse_attention, depth, moments, seed, num_batches=NUM_BATCHES, halves=halves)


MODELS: dict[str, Callable[..., Trace]] = {
    model.__name__: model for model in (dense, pruning, freezing, early_exit, moe, mod, sparse_attention)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/traces"))
    parser.add_argument("--depths", type=int, nargs="+", default=list(DEPTHS))
    options = parser.parse_args()
    for name, model in MODELS.items():
        for depth in options.depths:
            print(model(depth).save(options.out / f"{name}_{depth}.json"))


if __name__ == "__main__":
    main()
