"""Who sends which elements of sharded state to whom: every rank gets what it needs and does not have, once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from dynpipe_ds.migration import FlatLayout, least_bytes, plan_transfers
from dynpipe_ds.migration.shards import Place, Run, joined, runs_of

KINDS = {"master": 4, "exp_avg": 4, "exp_avg_sq": 4}


def stages(layers: Sequence[int], cut: int, replicas: int, alignment: int = 1) -> list[FlatLayout]:
    """Two stages, each with a flat buffer that its replicas share out; layer i has one parameter of that size."""
    first, second = tuple(range(replicas)), tuple(range(replicas, 2 * replicas))
    sizes = dict(enumerate(layers))
    parts = {i: n for i, n in sizes.items() if i < cut}, {i: n for i, n in sizes.items() if i >= cut}
    return [FlatLayout(part, ranks, 2, alignment) for part, ranks in zip(parts, (first, second), strict=True)]


def holders(layouts: Sequence[FlatLayout]) -> dict[tuple[object, int], int]:
    """Rank of each element of each parameter, counted element by element."""
    found = {}
    for layout in layouts:
        position = 0
        for name, size in layout.sizes.items():
            position += -position % layout.alignment
            for i in range(size):
                found[name, i] = layout.ranks[(position + i) // layout.share]
            position += size
    return found


@pytest.mark.parametrize("seed", range(40))
def test_every_element_goes_once_from_its_holder_to_who_needs_it(seed: int) -> None:
    draw = random.Random(seed)
    layers = [draw.randint(1, 40) for _ in range(draw.randint(2, 8))]
    replicas, alignment = draw.randint(1, 4), draw.choice([1, 4])
    cuts = [draw.randint(0, len(layers)) for _ in range(2)]
    before, after = (stages(layers, cut, replicas, alignment) for cut in cuts)
    had, needs = holders(before), holders(after)
    sent: Counter[tuple[object, int]] = Counter()
    for source, destination, name, start, stop, kind in plan_transfers(before, after, list(KINDS)):
        for i in range(start, stop) if kind == "master" else ():
            sent[name, i] += 1
            assert had[name, i] == source and needs[name, i] == destination and source != destination
    assert sent == Counter(element for element in had if had[element] != needs[element])
    moved = sum(size for i, size in enumerate(layers) if (i < cuts[0]) != (i < cuts[1]))
    state = 12 * sent.total()
    assert least_bytes(before, after, KINDS) == state
    assert least_bytes(before, after, KINDS, weight_bytes=2) == state + 2 * replicas * moved


def test_by_hand() -> None:
    """Stage 0 holds 8 elements in two shares of 4, then 4 in shares of 2: what its second replica has first, moves."""
    before, after = ([FlatLayout({"a": 4, "b": 4}, (0, 1))], [FlatLayout({"b": 4}, (0, 1))])
    assert [tuple(t) for t in plan_transfers(before, after, ["master"])] == [(1, 0, "b", 0, 2, "master")]
    assert least_bytes(before, after, {"master": 4}) == 8
    to_other = [FlatLayout({"a": 4}, (0, 1)), FlatLayout({"b": 4}, (2, 3))]
    assert [tuple(t)[:5] for t in plan_transfers(before, to_other, ["m"])] == [
        (0, 1, "a", 2, 4), (1, 2, "b", 0, 2), (1, 3, "b", 2, 4),
    ]


def test_what_one_of_the_layouts_lacks_does_not_travel() -> None:
    before, after = [FlatLayout({"frozen": 6, "a": 2}, (0,))], [FlatLayout({"a": 2, "thawed": 4}, (1,))]
    assert [t.parameter for t in plan_transfers(before, after, ["m"])] == ["a"]


def test_runs_that_continue_each_other_are_one() -> None:
    ranks = (0, 1)
    old = [Place(ranks, 6, 0, 4), Place(ranks, 6, 4, 8)]
    new = [Place(ranks, 6, 0, 4), Place(ranks, 6, 4, 8)]
    runs = [run for a, b in zip(old, new, strict=True) for run in runs_of(a, b)]
    assert len(runs) == 3 and joined(runs) == [Run(0, 0, 0, 0, 6), Run(1, 1, 0, 0, 6)]
    apart = [Run(0, 1, 0, 0, 2), Run(1, 1, 0, 2, 3), Run(0, 1, 2, 2, 1), Run(0, 1, 4, 3, 1)]
    assert joined(apart) == [Run(0, 1, 0, 0, 3), Run(1, 1, 0, 2, 3), Run(0, 1, 4, 3, 1)]
