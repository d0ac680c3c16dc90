"""Who holds whose copy."""

from __future__ import annotations

from collections import Counter

import pytest

from dynpipe_ds.snapshots.neighbours import neighbours, share_is_safe


@pytest.mark.parametrize("nodes", [
    "aa", "ab", "aaaa", "aabb", "abab", "aaab", "baaa", "abbb", "aabbc", "abcabc", "aaabbbccc", "aaaabc", "abcdefg",
])  # fmt: skip
def test_everybody_holds_one_copy_of_another_and_as_many_as_can_on_another_node(nodes: str) -> None:
    holders = neighbours(nodes)
    assert sorted(holders) == list(range(len(nodes)))
    assert all(holder != rank for rank, holder in enumerate(holders))
    elsewhere = sum(nodes[holder] != nodes[rank] for rank, holder in enumerate(holders))
    fullest = max(Counter(nodes).values())
    assert elsewhere == min(len(nodes), 2 * (len(nodes) - fullest))  # more can't be: who leaves makes room for one


def test_a_single_rank_has_no_neighbour() -> None:
    assert neighbours("a") == ()
    assert neighbours("aaa") == (1, 2, 0)


@pytest.mark.parametrize(("nodes", "replicas", "safe"), [
    ("aaaa", [0, 1], True), ("aaaa", [0], False), ("aabb", [0, 1], False), ("aabb", [0, 2], True),
])  # fmt: skip
def test_replicas_keep_what_they_share_if_they_are_not_lost_together(
    nodes: str, replicas: list[int], safe: bool
) -> None:
    assert share_is_safe(nodes, replicas) is safe
