"""Decisions against brute force on small cases, the paper's example of packing, and every refusal."""

from __future__ import annotations

import random
from itertools import combinations, pairwise
from typing import Any

import pytest

from dynpipe_ds.measure.profile import LayerProfile, PipelineProfile, StageProfile
from dynpipe_ds.release import Constraints
from dynpipe_ds.repacking.decision import Wish, to_stages
from dynpipe_ds.repacking.decision import fewest_stages as decide
from dynpipe_ds.repacking.first_fit import first_fit
from dynpipe_ds.repacking.outcome import Refusal, Repacking
from dynpipe_ds.repacking.request import Request
from dynpipe_ds.repacking.survivors import Workers, choose_survivors, possible_counts

MiB = 2**20


def profile(
    seconds: list[float], *, micro_batches: int = 4, state: list[int] | None = None, held: list[int] | None = None,
    stages: tuple[StageProfile, ...] = (), boundaries: tuple[int, ...] = (),
) -> PipelineProfile:
    state, held = state or [10] * len(seconds), held or [1] * len(seconds)
    layers = tuple(
        LayerProfile(f"layer {i}", s / 3, 2 * s / 3, b, b, 0, 0 if not stages else b, a)
        for i, (s, b, a) in enumerate(zip(seconds, state, held, strict=True))
    )
    return PipelineProfile(7, boundaries, micro_batches, layers, stages)


def in_order(num_stages: int, nodes: list[str]) -> Workers:
    """As DeepSpeed's ``PipeDataParallelTopology`` numbers ranks: rank = stage * replicas + replica."""
    replicas = len(nodes) // num_stages
    return Workers(tuple(tuple(range(s * replicas, (s + 1) * replicas)) for s in range(num_stages)), tuple(nodes))


def request(seconds: list[float], current: tuple[int, ...], **options: Any) -> Request:
    given = {k: options.pop(k) for k in ("micro_batches", "state", "held", "stages", "boundaries") if k in options}
    nodes = options.pop("nodes", None)
    workers = options.pop("workers", None) or in_order(
        len(current) - 1, nodes or [f"n{i}" for i in range(len(current) - 1)]
    )
    return Request(profile(seconds, **given), current, workers, **options)


def fewest_stages(request: Request, **wish: Any) -> Repacking | Refusal:
    return decide(request, Wish(**wish))


def granted(found: Repacking | Refusal) -> Repacking:
    assert isinstance(found, Repacking), found
    return found


def refused(found: Repacking | Refusal) -> str:
    assert isinstance(found, Refusal), found
    return found.reason


def one_f_one_b_s(request: Request, cuts: tuple[int, ...]) -> float:
    """Makespan of 1F1B by its dependencies, one micro-batch and stage after the other."""
    num_stages, count = len(cuts) - 1, request.profile.num_micro_batches
    layers = request.profile.layers
    forward = [sum(layer.forward_s for layer in layers[a:b]) for a, b in pairwise(cuts)]
    backward = [sum(layer.backward_s for layer in layers[a:b]) for a, b in pairwise(cuts)]
    orders = []
    for stage in range(num_stages):
        warm = min(count, num_stages - stage)
        order = [("f", m) for m in range(warm)]
        for m in range(count):
            order.append(("b", m))
            if warm + m < count:
                order.append(("f", warm + m))
        orders.append(order)
    done: dict[tuple[str, int, int], float] = {}
    free, position = [0.0] * num_stages, [0] * num_stages
    while any(position[s] < 2 * count for s in range(num_stages)):
        for s in range(num_stages):
            if position[s] == 2 * count:
                continue
            kind, m = orders[s][position[s]]
            before = ("f", s - 1, m) if kind == "f" else ("b", s + 1, m)
            inside = 0 <= before[1] < num_stages
            if inside and before not in done:
                continue
            start = max(free[s], done[before] if inside else 0.0)
            free[s] = done[kind, s, m] = start + (forward if kind == "f" else backward)[s]
            position[s] += 1
    return max(free)


def best_partitions(request: Request, num_stages: int) -> list[tuple[int, ...]]:
    """Those with the smallest bottleneck within the cap, by trying all."""
    num_layers = len(request.profile.layers)
    feasible = []
    for inner in combinations(range(1, num_layers), num_stages - 1):
        cuts = (0, *inner, num_layers)
        if set(inner) & set(request.pinned):
            continue
        cap = request.memory_cap_bytes
        if cap is None or max(request.stage_bytes(cuts)) <= cap:
            feasible.append((max(request.profile.stage_seconds(cuts)), cuts))
    least = min(feasible)[0] if feasible else 0.0
    return [cuts for bottleneck, cuts in feasible if bottleneck <= least * (1 + 1e-9)]


def random_request(rng: random.Random, **options: Any) -> Request:
    num_layers = rng.randint(4, 9)
    num_stages = rng.randint(2, min(5, num_layers))
    seconds = [rng.choice([0.01, 0.02, 0.1]) * (1 + rng.random()) for _ in range(num_layers)]
    state, held = [[rng.randint(1, 20) for _ in seconds] for _ in range(2)]
    inner = sorted(rng.sample(range(1, num_layers), num_stages - 1))
    cap = rng.choice([None, rng.randint(30, 250)])
    pinned = [c for c in range(1, num_layers) if c not in inner and rng.random() < 0.15]
    return request(
        seconds, (0, *inner, num_layers), micro_batches=rng.randint(1, 6), state=state, held=held,
        memory_cap_bytes=cap, pinned=pinned, **options,
    )


def test_fewest_stages_agrees_with_brute_force() -> None:
    rng = random.Random(3)
    counts = {"shrunk": 0, "too slow": 0, "no memory": 0}
    for _ in range(300):
        case, tolerance = random_request(rng), rng.choice([0.0, 0.05, 0.3, 0.6])
        now_s = one_f_one_b_s(case, case.current)
        best_s = min([now_s, *(one_f_one_b_s(case, cuts) for cuts in best_partitions(case, case.num_stages))])
        best = {n: best_partitions(case, n) for n in range(1, case.num_stages)}
        found = fewest_stages(case, tolerance=tolerance)
        last = found.num_stages if isinstance(found, Repacking) else case.num_stages
        for num_stages in range(1, last):  # all that it passed over are too slow, or don't fit
            kept = [best_s / one_f_one_b_s(case, cuts) for cuts in best[num_stages]]
            assert not kept or min(kept) < 1 - tolerance + 1e-9
        if isinstance(found, Refusal):
            assert any(best.values()) or "tolerance = " not in found.reason
            counts["too slow" if any(best.values()) else "no memory"] += 1
            continue
        shrink = granted(found)
        counts["shrunk"] += 1
        assert shrink.boundaries in best[shrink.num_stages]
        assert best_s / shrink.seconds_after >= 1 - tolerance - 1e-9
        assert shrink.seconds_before == pytest.approx(now_s)
        assert shrink.seconds_after == pytest.approx(one_f_one_b_s(case, shrink.boundaries))
        assert f"{shrink.num_stages} stages keep {shrink.throughput_kept:.1%}" in shrink.reason
        if case.memory_cap_bytes is not None:
            assert max(shrink.stage_bytes) <= case.memory_cap_bytes
    assert min(counts.values()) > 20, counts


def test_fewer_stages_hold_fewer_micro_batches() -> None:
    """Memory in flight is counted for the new number of stages."""
    case = request([1.0] * 8, (0, 2, 4, 6, 8), state=[0] * 8, held=[10] * 8, micro_batches=8, memory_cap_bytes=100)
    assert case.stage_bytes(case.current) == (80, 60, 40, 20)
    shrink = granted(to_stages(case, 2))
    assert shrink.stage_bytes == (80, 40) or shrink.stage_bytes == (100, 30)
    assert "num_stages = 1" not in shrink.reason and granted(to_stages(case, 1)).stage_bytes == (80,)
    # The sums of now: 80 + 60 > 100. The paper's algorithm must stop where ours goes on.
    assert granted(first_fit(case)).boundaries == (0, 2, 6, 8)


def test_freezing_or_pruning_lets_stages_go() -> None:
    """Most layers cost nothing any more: one stage does the work of four."""
    case = request([0.0] * 11 + [1.0], (0, 3, 6, 9, 12), micro_batches=8)
    shrink = granted(fewest_stages(case, tolerance=0.0))
    assert shrink.num_stages == 1 and shrink.throughput_kept == 1.0
    # What moving layers alone would bring counts: three workers are needed for that, whatever the present cut.
    unbalanced = request([0.0] * 9 + [1.0] * 3, (0, 3, 6, 9, 12), micro_batches=8)
    assert granted(fewest_stages(unbalanced, tolerance=0.0)).num_stages == 3
    balanced = request([1.0] * 12, (0, 3, 6, 9, 12), micro_batches=8)
    assert refused(fewest_stages(balanced, tolerance=0.1)).startswith("tolerance = 0.1: no smaller number of stages")


def test_the_step_counts() -> None:
    """The optimizer step is shared out by optimizer state, so fewer stages step longer."""
    stages = tuple(StageProfile(1.0, 0.0, 0.0, step, 2.0, 0) for step in (1.0, 3.0))
    case = request(
        [1.0, 1.0, 1.0, 0.0], (0, 2, 4), micro_batches=1, state=[1, 1, 3, 0], stages=stages, boundaries=(0, 2, 4)
    )
    shrink = granted(to_stages(case, 1))
    assert shrink.seconds_after == pytest.approx(3.0 + 4.0)
    assert shrink.seconds_before == pytest.approx(5 / 3 + 3.0)  # while the last stage steps, gradients go back


def merge_by_brute_force(held: tuple[int, ...], cap: int) -> int:
    """Fewest contiguous groups of stages whose bytes fit."""
    size = len(held)
    for count in range(1, size + 1):
        for inner in combinations(range(1, size), count - 1):
            groups = [held[a:b] for a, b in pairwise((0, *inner, size))]
            if all(len(group) == 1 or sum(group) <= cap for group in groups):
                return count
    raise AssertionError


def test_first_fit_merges_whole_stages_as_far_as_possible() -> None:
    rng = random.Random(5)
    shrunk = 0
    for _ in range(300):
        case = random_request(rng)
        if case.memory_cap_bytes is None:
            continue
        assert isinstance(case.memory_cap_bytes, int)
        held = case.stage_bytes(case.current)
        fewest = merge_by_brute_force(held, case.memory_cap_bytes)
        found = first_fit(case)
        if fewest == case.num_stages:
            assert "first fit finds no stages to merge" in refused(found)
            continue
        shrink = granted(found)
        shrunk += 1
        assert shrink.num_stages == fewest
        assert set(shrink.boundaries) <= set(case.current)
        # What the paper adds up is never less than what the merged stages hold.
        for size, (first, end) in zip(shrink.stage_bytes, pairwise(shrink.boundaries), strict=True):
            merged = [
                b for b, (low, high) in zip(held, pairwise(case.current), strict=True) if first <= low and high <= end
            ]
            assert size <= sum(merged)
            assert len(merged) == 1 or sum(merged) <= case.memory_cap_bytes
        for target in range(fewest, case.num_stages):
            assert granted(first_fit(case, target_stages=target)).num_stages == target
            assert granted(first_fit(case, min_stages=target)).num_stages == target
        if fewest > 1:
            assert f"target_stages = {fewest - 1}: first fit with a cap" in refused(
                first_fit(case, target_stages=fewest - 1)
            )
    assert shrunk > 50


def test_first_fit_needs_one_cap() -> None:
    for cap in (None, [50, 50]):
        case = request([1.0] * 4, (0, 2, 4), memory_cap_bytes=cap)
        assert "memory_cap_bytes = " in refused(first_fit(case)) and "one cap for all" in refused(first_fit(case))


# -- who stays --------------------------------------------------------------------------------------------------


def allowed(workers: Workers, rules: Constraints, stages: tuple[int, ...]) -> bool:
    """The constraints, word by word."""
    ranks = set(workers.ranks_of(stages))
    gone = set(range(len(workers.nodes))) - ranks
    stay = rules.ranks_stay | {r for r, node in enumerate(workers.nodes) if node in rules.nodes_stay}
    whole = not ({workers.nodes[r] for r in ranks} & {workers.nodes[r] for r in gone})
    lowest = ranks == set(range(len(ranks)))
    return stay <= ranks and (whole or not rules.whole_nodes) and (lowest or not rules.lowest_stay)


def random_workers(rng: random.Random, *, cyclic: bool) -> tuple[Workers, Constraints]:
    num_stages, replicas = rng.randint(2, 7), rng.choice([1, 1, 2])
    size = num_stages * replicas
    per_node = rng.randint(1, 3)
    order = list(range(size))
    nodes = [f"n{r % -(-size // per_node)}" if cyclic else f"n{r // per_node}" for r in order]
    ranks = tuple(tuple(range(s * replicas, (s + 1) * replicas)) for s in range(num_stages))
    if rng.random() < 0.2:  # another topology: replicas first
        ranks = tuple(tuple(range(s, size, num_stages)) for s in range(num_stages))
    rules = Constraints(
        ranks_stay=frozenset(rng.sample(order, rng.choice([0, 0, 1, 2]))),
        nodes_stay=frozenset(rng.sample(nodes, rng.choice([0, 0, 1]))),
        whole_nodes=rng.random() < 0.6, lowest_stay=rng.random() < 0.2,
    )
    return Workers(ranks, tuple(nodes)), rules


@pytest.mark.parametrize("cyclic", [False, True])
def test_survivors_agree_with_brute_force(cyclic: bool) -> None:
    rng = random.Random(11)
    chosen = impossible = 0
    for _ in range(400):
        workers, rules = random_workers(rng, cyclic=cyclic)
        worth = [[rng.randint(0, 9) for _ in range(7)] for _ in range(7)]
        counts = []
        for n in range(1, workers.num_stages):
            choices = [c for c in combinations(range(workers.num_stages), n) if allowed(workers, rules, c)]
            found = choose_survivors(workers, rules, n, lambda old, new: (worth[old][new],))
            if not choices:
                assert found is None
                impossible += 1
                continue
            chosen += 1
            counts.append(n)
            assert found in choices
            if not cyclic and workers.ranks[0] == tuple(range(len(workers.ranks[0]))):
                best = max(sum(worth[old][new] for new, old in enumerate(c)) for c in choices)
                assert sum(worth[old][new] for new, old in enumerate(found)) == best
        assert possible_counts(workers, rules) == counts
    assert min(chosen, impossible) > 100


def test_whatever_is_granted_keeps_every_rule_and_what_is_refused_can_not_be() -> None:
    rng = random.Random(17)
    counts = {"granted": 0, "refused": 0}
    for _ in range(120):
        workers, rules = random_workers(rng, cyclic=rng.random() < 0.3)
        size = workers.num_stages
        num_layers = rng.randint(size, size + 4)
        cuts = (0, *sorted(rng.sample(range(1, num_layers), size - 1)), num_layers)
        caps = rng.choice([None, rng.randint(20, 80), [rng.randint(20, 80) for _ in range(size)]])
        case = request(
            [rng.uniform(0.1, 1.0) for _ in range(num_layers)], cuts, workers=workers, constraints=rules,
            memory_cap_bytes=caps, stage_speeds=rng.choice([None, [rng.choice([0.5, 1.0]) for _ in range(size)]]),
            pinned=[c for c in range(1, num_layers) if c not in cuts and rng.random() < 0.2],
        )
        decisions = [(n, to_stages(case, n)) for n in range(1, size)]
        decisions.append((None, fewest_stages(case, tolerance=0.3)))
        by_first_fit = (None, first_fit(case))
        for target, found in [*decisions, by_first_fit]:
            counts["granted" if isinstance(found, Repacking) else "refused"] += 1
            if isinstance(found, Repacking):
                check_rules(case, found, found is by_first_fit[1])
                assert target in (None, found.num_stages)
            elif target is not None and not case.workers_differ:
                choices = combinations(range(size), target)
                assert not any(allowed(workers, rules, c) for c in choices) or not best_partitions(case, target)
    assert min(counts.values()) > 100, counts


def check_rules(case: Request, found: Repacking, oversized: bool) -> None:
    """Everything that a shrink promises; first fit leaves a stage that is too large as it is."""
    stay, workers = found.surviving_stages, case.workers
    assert len(stay) == found.num_stages == len(found.boundaries) - 1 < case.num_stages
    assert allowed(workers, case.constraints, stay) and list(stay) == sorted(set(stay))
    assert found.surviving_ranks == workers.ranks_of(stay)
    assert sorted(found.surviving_ranks + found.released_ranks) == list(range(len(workers.nodes)))
    busy = {workers.nodes[rank] for rank in found.surviving_ranks}
    assert set(found.released_nodes) == set(workers.nodes) - busy
    assert list(found.boundaries) == sorted(set(found.boundaries)) and not set(found.boundaries) & set(case.pinned)
    assert found.stage_bytes == case.stage_bytes(found.boundaries)
    caps = case.memory_cap_bytes
    for size, stage in zip(found.stage_bytes, stay, strict=True):
        if isinstance(caps, list):
            assert size <= caps[stage]
        elif isinstance(caps, int):
            assert size <= caps or oversized


def test_those_stay_that_hold_the_most() -> None:
    """Stage 0 is empty by now, so its worker goes; its neighbour becomes stage 0."""
    case = request([1.0] * 4, (0, 0, 2, 4), nodes=["a", "b", "c"])
    shrink = granted(to_stages(case, 2))
    assert shrink.boundaries == (0, 2, 4)
    assert shrink.surviving_stages == (1, 2) == shrink.surviving_ranks
    assert shrink.released_ranks == (0,) and shrink.released_nodes == ("a",)
    kept = granted(to_stages(request([1.0] * 4, (0, 0, 2, 4), constraints=Constraints(ranks_stay=frozenset({0}))), 2))
    assert 0 in kept.surviving_ranks


def test_the_last_pods_go_whatever_ranks_they_have() -> None:
    """Pods 2 and 3 joined as ranks 1 and 2, before the last stage, which pod 1 runs."""
    workers = Workers(((0,), (1,), (2,), (3,)), ("p0", "p2", "p3", "p1"), (0, 2, 3, 1))
    rules = Constraints(whole_nodes=True, lowest_stay=True, ranks_stay=frozenset({0}))
    case = request([1.0] * 8, (0, 2, 4, 6, 8), workers=workers, constraints=rules)
    assert granted(to_stages(case, 3)).released_nodes == ("p3",)
    assert granted(to_stages(case, 2)).surviving_ranks == (0, 3)
    assert granted(to_stages(case, 1)).released_nodes == ("p2", "p3", "p1")


def test_a_stage_goes_with_all_its_replicas() -> None:
    """rank = stage * replicas + replica, as in DeepSpeed's topology."""
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    workers = in_order(3, ["a", "a", "b", "b", "c", "c"])
    topology = PipeDataParallelTopology(num_pp=3, num_dp=2)
    assert [list(r) for r in workers.ranks] == [topology.filter_match(pipe=stage) for stage in range(3)]
    shrink = granted(
        to_stages(
            request([1.0] * 6, (0, 2, 4, 6), workers=workers, constraints=Constraints(nodes_stay=frozenset({"c"}))), 1
        )
    )
    assert shrink.surviving_ranks == (4, 5) and shrink.released_ranks == (0, 1, 2, 3)
    assert shrink.released_nodes == ("a", "b")


def test_slow_workers_and_small_ones_go_first() -> None:
    case = request([1.0] * 4, (0, 1, 2, 3, 4), stage_speeds=[0.5, 1.0, 1.0, 0.5], memory_cap_bytes=[90, 50, 50, 99])
    shrink = granted(to_stages(case, 2))
    assert shrink.surviving_stages == (1, 2) and shrink.boundaries == (0, 2, 4)
    assert granted(to_stages(case, 3)).surviving_stages == (1, 2, 3)
    fast = request([1.0] * 4, (0, 1, 2, 3, 4), memory_cap_bytes=[90, 50, 50, 99])
    assert granted(to_stages(fast, 2)).surviving_stages == (0, 3)


def test_whole_nodes_decide_the_number() -> None:
    """Two stages on a node: from four, only two can be reached, and fewest_stages knows."""
    rules = Constraints(whole_nodes=True, nodes_stay=frozenset({"a"}))
    case = request([0.0] * 3 + [1.0], (0, 1, 2, 3, 4), nodes=["a", "a", "b", "b"], constraints=rules)
    shrink = granted(fewest_stages(case, tolerance=0.1))
    assert shrink.surviving_ranks == (0, 1) and shrink.released_nodes == ("b",)
    message = refused(to_stages(case, 3))
    assert message.startswith("num_stages = 3: the release back-end can't give back the others: nodes a must stay; ")
    assert "only whole nodes may go (a, a, b, b by rank)" in message and "can be reached: 2" in message
    loose = request([1.0] * 4, (0, 1, 2, 3, 4), nodes=["a", "a", "b", "b"], memory_cap_bytes=10**6, constraints=rules)
    assert granted(first_fit(loose)).num_stages == 2
    stuck = request([1.0] * 2, (0, 1, 2), nodes=["a", "a"], memory_cap_bytes=10**6, constraints=rules)
    assert "no worker can go" in refused(to_stages(stuck, 1)) and "no worker can go" in refused(first_fit(stuck))


# -- refusals ---------------------------------------------------------------------------------------------------


def test_a_target_below_what_memory_allows() -> None:
    case = request([1.0] * 8, (0, 2, 4, 6, 8), memory_cap_bytes=45, micro_batches=1)
    message = refused(to_stages(case, 1))
    assert message.startswith("num_stages = 1: ") and "raise the memory cap" in message
    assert message.endswith("; the next number of stages for which memory suffices is 2")
    tight = request([1.0] * 8, (0, 2, 4, 6, 8), memory_cap_bytes=22, micro_batches=1)
    assert refused(to_stages(tight, 2)).endswith("suffices for no number from there to the present 4 stages")
    assert refused(fewest_stages(tight, tolerance=0.9)).startswith("num_stages = 1: ")


@pytest.mark.parametrize("target", [0, 4, 5, -1])
def test_a_target_that_is_no_shrink(target: int) -> None:
    case = request([1.0] * 8, (0, 2, 4, 6, 8), memory_cap_bytes=10**6)
    fewer = f"num_stages = {target}: re-packing makes the 4 stages fewer; give a number from 1 to 3"
    assert refused(first_fit(case, target_stages=target)) == fewer
    more = f"num_stages = {target}: the pipeline has 4 stages, and no workers wait; give another number from 1 to 4"
    assert refused(to_stages(case, target)).startswith(fewer if target < 1 else more)


def test_one_stage_is_the_fewest() -> None:
    case = request([1.0] * 2, (0, 2))
    assert "the pipeline has 1 stages, and no workers wait" in refused(to_stages(case, 1))
    assert "there is one stage" in refused(to_stages(case, 0))
    assert refused(fewest_stages(case, tolerance=0.5)) == "min_stages = 1: the pipeline has 1; lower min_stages"
    case = request([0.0] * 4, (0, 1, 2, 4))
    assert granted(fewest_stages(case, tolerance=0.0, min_stages=2)).num_stages == 2


def test_pinned_cuts_limit_the_stages_less_when_there_are_fewer() -> None:
    case = request([1.0] * 4, (0, 1, 3, 4), pinned=[2])
    assert granted(to_stages(case, 2)).boundaries in {(0, 1, 4), (0, 3, 4)}


def test_wrong_values() -> None:
    with pytest.raises(ValueError, match="the stages must hold every rank from 0 to 1 once"):
        Workers(((0,), (0,)), ("a", "b"))
    with pytest.raises(ValueError, match="memory_cap_bytes = \\[1\\]: need one for each of 2 stages"):
        request([1.0] * 2, (0, 1, 2), memory_cap_bytes=[1])
    with pytest.raises(ValueError, match="stage_speeds = \\[1.0\\]: need one for each of 2 stages"):
        request([1.0] * 2, (0, 1, 2), stage_speeds=[1.0])
    with pytest.raises(ValueError, match="boundaries"):
        request([1.0] * 2, (0, 1, 3))
