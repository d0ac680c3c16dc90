"""What the paper's balancers count, and beside it what the same changes cost: load models over 10,000 iterations.

Wahib, Soyturk, Unat, "Balanced and Elastic End-to-end Training of Dynamic LLMs" (SC'25, arXiv:2505.14864; "DynMo"):

- ``<scenario>_equation`` is section 2's load of a layer, c_i times what its equation says;
- ``<scenario>_cost`` is *ours*: the same states (the same densities, the same frozen blocks), but what a block then
  takes, by the rules of ``models.py``.

The equations say what follows from a state and not which states a training goes through. Those, after "Assumed:", are
ours in both. Iterations are the paper's where it has them (section 5.1: pruning); hidden size 1,024, 2,048 tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.traces.blocks import BACKWARD_FACTOR, make, moment, operation_shares
from benchmarks.traces.models import cubic_sparsity, global_magnitude, survival
from benchmarks.traces.trace import Trace

ITERATIONS = 10_000
EVERY = 100
"""Iterations for which one draw holds where every iteration is another: a shorter run then has one for each batch."""
FIRST = 1000
"""Iteration of the first change where the paper names none."""
PRUNED_AT = (4000, 5000, 6000, 7000)
DENSE_AT = 0.29
"""Density above which a sparse product takes as long as a dense one (as in ``models.pruning``)."""
ROUTING = 0.02
"""Of a block: gathering the tokens that are left (as in ``models.early_exit``)."""


def sparsity_at(iteration: int) -> float:
    """The paper's Eq. 3 with section 5.1's setting: from iteration 3,000 to 7,000, every 1,000, up to 90%.

    It gives 0, 52.0, 78.8, 88.6 and 90.0%; the paper's text lists 52, 79 and 90.

    Args:
        iteration: of the step.
    """
    return cubic_sparsity((iteration - 3000) / 4000, 0.9)


def densities(depth: int, iteration: int) -> list[float]:
    """Share of its parameters that every block keeps under global magnitude pruning (Algorithm 1).

    Args:
        depth: L.
        iteration: of the step.
    """
    sigmas = [2.0 - block / max(1, depth - 1) for block in range(depth)]
    return [1.0 - s for s in global_magnitude(sparsity_at(iteration), sigmas)]


def pruning_equation(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """DynMo 2.2: a layer's load is p_i c_i, the share of parameters that it keeps times its dense cost.

    Assumed: weights of the first block are twice as large as those of the last, so that deeper blocks lose more.

    Args:
        depth: L.
        seed: not used, nothing is drawn.
        halves: whether attention and MLP of a block are two layers.
    """
    moments = [moment(0, [1.0] * depth)]
    for iteration in PRUNED_AT:
        kept = densities(depth, iteration)
        moments.append(moment(iteration, kept, parameters=kept))
    return make(pruning_equation, depth, moments, -1, num_batches=ITERATIONS, halves=halves)


def pruning_cost(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Ours: a product gains nothing above a density of 0.29 and is linear below; scores are not pruned.

    Assumed: densities as in ``pruning_equation``; the crossover is what Gale et al. 2020 report for Sputnik.

    Args:
        depth: L.
        seed: not used, nothing is drawn.
        halves: whether attention and MLP of a block are two layers.
    """
    _, mlp, scores = operation_shares()
    moments = [moment(0, [1.0] * depth)]
    for iteration in PRUNED_AT:
        kept = densities(depth, iteration)
        left = [min(1.0, density / DENSE_AT) for density in kept]
        costs = [scores + (1.0 - scores) * share for share in left]
        moments.append(moment(iteration, costs, parameters=kept, mlps=[mlp * share for share in left]))
    return make(pruning_cost, depth, moments, -1, num_batches=ITERATIONS, halves=halves)


def frozen_blocks(depth: int) -> list[tuple[int, int]]:
    """Iterations at which blocks freeze front to back, and how many are frozen then: a twelfth more every 900.

    Args:
        depth: L.
    """
    return [(900 * step, round(depth * step / 12)) for step in range(1, 8)]


def freezing_equation(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """DynMo 2.3: a layer's load is (1 - f_i) c_i: a frozen one counts as none, its forward included.

    Assumed: blocks freeze front to back, a twelfth of them every 900 iterations, three of the paper's intervals, until
    seven twelfths are frozen.

    Args:
        depth: L.
        seed: not used, nothing is drawn.
        halves: whether attention and MLP of a block are two layers.
    """
    moments = [moment(0, [1.0] * depth)]
    for iteration, count in frozen_blocks(depth):
        moments.append(moment(iteration, [0.0] * count + [1.0] * (depth - count), frozen=count))
    return make(freezing_equation, depth, moments, -1, num_batches=ITERATIONS, halves=halves)


def freezing_cost(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Ours: a frozen block has no backward and still runs forward.

    Assumed: blocks freeze as in ``freezing_equation``.

    Args:
        depth: L.
        seed: not used, nothing is drawn.
        halves: whether attention and MLP of a block are two layers.
    """
    moments = [moment(0, [1.0] * depth)]
    for iteration, count in frozen_blocks(depth):
        backward = [0.0] * count + [BACKWARD_FACTOR] * (depth - count)
        moments.append(moment(iteration, [1.0] * depth, backward, frozen=count))
    return make(freezing_cost, depth, moments, -1, num_batches=ITERATIONS, halves=halves)


def _pairs_left(depth: int, seed: int) -> list[tuple[int, list[float]]]:
    """Iteration, and share of each block's pairs of tokens that hash buckets leave (Pagliardini et al. 2023)."""
    rng = np.random.default_rng(seed)
    concentration = np.exp(rng.uniform(math.log(0.1), math.log(10.0), depth))
    return [
        (iteration, [float((rng.dirichlet([c] * 16) ** 2).sum()) for c in concentration])
        for iteration in range(FIRST, ITERATIONS, EVERY)
    ]


def sparse_attention_equation(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """DynMo 2.4: a layer's load is s_i c_i, the share of the attention matrix that is left: the whole layer scales.

    Assumed: 16 hash buckets from iteration 1,000 on; how tokens spread over them differs by block and draw.

    Args:
        depth: L.
        seed: of the draws.
        halves: whether attention and MLP of a block are two layers.
    """
    moments = [moment(0, [1.0] * depth), *(moment(at, shares) for at, shares in _pairs_left(depth, seed))]
    return make(sparse_attention_equation, depth, moments, seed, num_batches=ITERATIONS, halves=halves)


def sparse_attention_cost(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Ours: scores alone are saved, a quarter of a block's operations at 2,048 tokens.

    Assumed: pairs as in ``sparse_attention_equation``; sorting and ragged buckets make them 1.5 times as dear.

    Args:
        depth: L.
        seed: of the draws.
        halves: whether attention and MLP of a block are two layers.
    """
    _, mlp, scores = operation_shares()
    moments = [moment(0, [1.0] * depth)]
    for iteration, shares in _pairs_left(depth, seed):
        costs = [1.0 - scores + scores * min(1.0, 1.5 * share) for share in shares]
        moments.append(moment(iteration, costs, mlps=[mlp] * depth))
    return make(sparse_attention_cost, depth, moments, seed, num_batches=ITERATIONS, halves=halves)


def _survivors(depth: int) -> list[tuple[int, list[float]]]:
    """Iteration, and share of the tokens that reach each block."""
    return [
        (iteration, [survival(block, depth, min(1.0, iteration / 6000)) for block in range(depth)])
        for iteration in range(FIRST, 6001, 500)
    ]


def early_exit_equation(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """DynMo 2.5: a layer's load is (t_i / t) c_i, the share of the tokens that reach it.

    Assumed: a log-logistic share that falls with depth, and further with training until iteration 6,000; then half of
    the tokens have left at 35% of the depth.

    Args:
        depth: L.
        seed: not used, nothing is drawn.
        halves: whether attention and MLP of a block are two layers.
    """
    moments = [moment(0, [1.0] * depth), *(moment(at, shares) for at, shares in _survivors(depth))]
    return make(early_exit_equation, depth, moments, -1, num_batches=ITERATIONS, halves=halves)


def early_exit_cost(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Ours: the share of the tokens, and 2% of a block for gathering them.

    Assumed: shares as in ``early_exit_equation``.

    Args:
        depth: L.
        seed: not used, nothing is drawn.
        halves: whether attention and MLP of a block are two layers.
    """
    moments = [moment(0, [1.0] * depth)]
    moments += [moment(at, [min(1.0, share + ROUTING) for share in shares]) for at, shares in _survivors(depth)]
    return make(early_exit_cost, depth, moments, -1, num_batches=ITERATIONS, halves=halves)


def _routed(depth: int, seed: int) -> list[tuple[int, list[float]]]:
    """Iteration, and share of the tokens that every second block computes; 1 for the others."""
    rng = np.random.default_rng(seed)
    found = []
    for iteration in range(FIRST, ITERATIONS, EVERY):
        shares = np.minimum(1.0, 0.125 * np.exp(rng.normal(0.0, 0.3, depth))).tolist()
        found.append((iteration, [share if block % 2 else 1.0 for block, share in enumerate(shares)]))
    return found


def mod_equation(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """DynMo 2.6: a layer's load is r_i t_i c_i, its routing weight and the tokens that it computes.

    Assumed: r_i = 1; every second block computes 12.5% of the tokens from iteration 1,000 on, log-normally by 30%,
    drawn anew each time.

    Args:
        depth: L.
        seed: of the draws.
        halves: whether attention and MLP of a block are two layers; routed blocks stay whole.
    """
    moments = [moment(0, [1.0] * depth), *(moment(at, shares) for at, shares in _routed(depth, seed))]
    whole = range(1, depth, 2)
    return make(mod_equation, depth, moments, seed, num_batches=ITERATIONS, halves=halves, whole=whole)


def mod_cost(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Ours: the share of the tokens, and 2% of a block for routing and gathering them.

    Assumed: shares as in ``mod_equation``.

    Args:
        depth: L.
        seed: of the draws.
        halves: whether attention and MLP of a block are two layers; routed blocks stay whole.
    """
    moments = [moment(0, [1.0] * depth)]
    moments += [
        moment(at, [min(1.0, share + ROUTING * (block % 2)) for block, share in enumerate(shares)])
        for at, shares in _routed(depth, seed)
    ]
    whole = range(1, depth, 2)
    return make(mod_cost, depth, moments, seed, num_batches=ITERATIONS, halves=halves, whole=whole)


def moe_equation(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """DynMo 2.1: a worker's load is the tokens routed to its experts, added up.

    A stage that holds all experts of its blocks gets every token of a block, top-k times, wherever they go. So the sum
    is the same for all blocks, whatever the router does. Assumed: no token is dropped.

    Args:
        depth: L.
        seed: not used, nothing is drawn.
        halves: whether attention and MLP of a block are two layers.
    """
    return make(moe_equation, depth, [moment(0, [1.0] * depth)], -1, num_batches=ITERATIONS, halves=halves)


def moe_cost(depth: int, seed: int = 0, *, halves: bool = False) -> Trace:
    """Ours: experts side by side; a block lasts as long as its fullest one: MLP times E max_e p_e (top-2 of 8).

    Assumed: p is Dirichlet(50 q_l) around the block's own popularity q_l, a Zipf law r^-s with s uniform in 0..1, drawn
    anew each time; no token is dropped.

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
    mlp, moments = operation_shares()[1], []
    for iteration in range(0, ITERATIONS, EVERY):
        loads = [experts * float(rng.dirichlet(50 * q).max()) for q in popularity]
        mlps = [mlp * load for load in loads]
        moments.append(moment(iteration, [1.0 - mlp + part for part in mlps], mlps=mlps))
    return make(moe_cost, depth, moments, seed, num_batches=ITERATIONS, halves=halves)


EQUATIONS: dict[str, Callable[..., Trace]] = {
    model.__name__: model
    for model in (
        pruning_equation, pruning_cost, freezing_equation, freezing_cost, sparse_attention_equation,
        sparse_attention_cost, early_exit_equation, early_exit_cost, mod_equation, mod_cost, moe_equation, moe_cost,
    )
}
