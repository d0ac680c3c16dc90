"""A batch of a pipeline whose stages hold layers that do not follow each other: what the library can't run.

The paper's diffusion may give any layer to any rank. A micro-batch then passes the ranks in the order of its layers and
comes to some of them several times. No schedule is published for that. Here each range of layers keeps the order that
it would have under 1F1B with a rank of its own, and a rank with several takes what is ready: backwards first, then
earlier micro-batches. For contiguous stages that is 1F1B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby

import numpy as np


@dataclass(frozen=True)
class Chunk:
    """A range of layers on one rank.

    Args:
        rank: that holds it.
        first: layer.
        end: layer after the last.
    """

    rank: int
    first: int
    end: int


def chunks_of(holders: Sequence[int]) -> list[Chunk]:
    """Ranges of layers that follow each other on one rank.

    Args:
        holders: rank of every layer.
    """
    found: list[Chunk] = []
    for rank, layers in groupby(range(len(holders)), key=holders.__getitem__):
        indices = list(layers)
        found.append(Chunk(rank, indices[0], indices[-1] + 1))
    return found


@dataclass(frozen=True)
class Passes:
    """Seconds of a batch.

    Args:
        forward_s: ``(L, M)`` of every layer and micro-batch.
        backward_s: the same of backwards.
        frozen_layers: leading layers without backward.
        forward_extra_s: of a forward through a range, beside its layers.
        backward_extra_s: the same of a backward.
        message_s: a message between two ranks.
        links_s: ``(2, L - 1, M)``, what the activations behind every layer, and the gradients back, take beside that;
            left out: nothing.
    """

    forward_s: np.ndarray
    backward_s: np.ndarray
    frozen_layers: int = 0
    forward_extra_s: float = 0.0
    backward_extra_s: float = 0.0
    message_s: float = 0.0
    links_s: np.ndarray | None = None

    def travels_s(self, layer: int, micro_batch: int, *, is_back: bool) -> float:
        """Seconds of a message between two ranks.

        Args:
            layer: before the boundary.
            micro_batch: that it belongs to.
            is_back: whether it carries gradients.
        """
        drawn = 0.0 if self.links_s is None else float(self.links_s[int(is_back), layer, micro_batch])
        return self.message_s + drawn


def makespan_s(holders: Sequence[int], passes: Passes) -> float:
    """Seconds from the first forward to the end of the last backward.

    Args:
        holders: rank of every layer.
        passes: what everything takes.
    """
    chunks = chunks_of(holders)
    count, last = passes.forward_s.shape[1], len(chunks) - 1
    until = next((c for c, chunk in enumerate(chunks) if chunk.end > passes.frozen_layers), len(chunks))
    seconds = {
        False: _sums(chunks, passes.forward_s, passes.forward_extra_s),
        True: _sums(chunks, passes.backward_s, passes.backward_extra_s),
    }
    orders = [_order(last - c, count, trains=c >= until) for c in range(len(chunks))]
    on_rank: dict[int, list[int]] = {chunk.rank: [] for chunk in chunks}
    for c, chunk in enumerate(chunks):
        on_rank[chunk.rank].append(c)
    done, busy, end_s = [0] * len(chunks), set[int](), 0.0
    here = {(0, False, micro_batch) for micro_batch in range(count)}  # chunk, whether backward, micro-batch: has come
    events: list[tuple[float, int, int, bool, int]] = []  # when, is over (1) or comes (0), chunk, backward, micro-batch

    def begin(rank: int, now_s: float) -> None:
        if rank in busy:
            return
        nexts = [(c, *orders[c][done[c]]) for c in on_rank[rank] if done[c] < len(orders[c])]
        ready = [job for job in nexts if job in here]
        if not ready:
            return
        job = min(ready, key=lambda job: (not job[1], job[2], -job[0]))
        busy.add(rank)
        done[job[0]] += 1
        heappush(events, (now_s + seconds[job[1]][job[0]][job[2]], 1, *job))

    begin(chunks[0].rank, 0.0)
    while events:
        now_s, is_over, c, is_back, micro_batch = heappop(events)
        rank = chunks[c].rank
        if not is_over:
            here.add((c, is_back, micro_batch))
        else:
            busy.discard(rank)
            end_s = max(end_s, now_s)
            following = _following(c, last, until, is_back=is_back)
            if following is not None:
                there, back = following
                travels_s = 0.0
                if chunks[there].rank != rank:
                    before = min(c, there)
                    travels_s = passes.travels_s(chunks[before].end - 1, micro_batch, is_back=back)
                heappush(events, (now_s + travels_s, 0, there, back, micro_batch))
        begin(rank, now_s)
    return end_s


def _order(behind: int, count: int, *, trains: bool) -> list[tuple[bool, int]]:
    """1F1B of one range of layers with some behind it: whether backward, and which micro-batch."""
    if not trains:
        return [(False, m) for m in range(count)]
    ahead = min(behind, count)
    order = [(False, m) for m in range(ahead)]
    for m in range(count):
        order += [(False, m + ahead)] if m + ahead < count else []
        order.append((True, m))
    return order


def _following(chunk: int, last: int, until: int, *, is_back: bool) -> tuple[int, bool] | None:
    """Chunk that comes after one, and whether it goes backward there; ``None`` at the end."""
    if not is_back and chunk < last:
        return chunk + 1, False
    there = chunk - 1 if is_back else last
    return (there, True) if there >= until else None


def _sums(chunks: Sequence[Chunk], seconds: np.ndarray, extra_s: float) -> list[list[float]]:
    return [(seconds[chunk.first : chunk.end].sum(0) + extra_s).tolist() for chunk in chunks]
