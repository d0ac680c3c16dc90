"""The scenario: how many buckets each block's attention has, batch by batch, and what that computes."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from deepspeed.pipe import LayerSpec

from scenarios.gpt import Block, GPTConfig
from scenarios.kernels import in_use, names
from scenarios.scenario import Engine, Report, Scenario, gather_by_layer
from scenarios.sparse_attention.attention import TASK, Hashing, HashSparseAttention, HashSparseBlock


@dataclass(kw_only=True)
class SparseAttention(Scenario):
    """Attention that becomes sparse by a schedule, as sparse in each block as its data makes it.

    Attributes:
        batches: increasing batch indices.
        buckets: for each of them the number of buckets from that batch on: even, or 1 for dense attention,
            as it is before the first.
        blocks: for each of them the share of blocks, counted from the front, that are sparse.
        hashing: ``"shared"`` or ``"separate"``, see :class:`HashSparseAttention`.
        redraw_every: batches after which the hashes are drawn anew; 0 for never.
        seed: of the hashes.
        kernel: ``"auto"`` for the best on the device, or ``"sdpa"``, ``"flex"``.
    """

    batches: Sequence[int] = (4, 24)
    buckets: Sequence[int] = (16, 16)
    blocks: Sequence[float] = (0.5, 1.0)
    hashing: Hashing = "shared"
    redraw_every: int = 0
    seed: int = 0
    kernel: str = "auto"
    _sparse_layers: list[int] = field(init=False, default_factory=list)
    _model: GPTConfig = field(init=False)
    _batch: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Refuse settings without a meaning, all problems at once."""
        problems = [*self._problems_of_schedule()]
        for name, known in {"hashing": get_args(Hashing), "kernel": (*names(TASK), "auto")}.items():
            if getattr(self, name) not in known:
                problems.append(f"{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(known)}")
        if self.redraw_every < 0:
            problems.append(f"redraw_every={self.redraw_every} must be 0 (never) or a number of batches")
        if problems:
            raise ValueError("scenario: " + "; ".join(problems))

    def _problems_of_schedule(self) -> Iterator[str]:
        """Yield what is wrong with ``batches``, ``buckets`` and ``blocks``."""
        lengths = {name: len(getattr(self, name)) for name in ("batches", "buckets", "blocks")}
        if len(set(lengths.values())) > 1:
            entries = ", ".join(f"{name} has {n} entries" for name, n in lengths.items())
            yield f"{entries}: give one number of buckets and one share of blocks for each batch"
        if any(a >= b for a, b in zip([-1, *self.batches], self.batches, strict=False)):
            yield f"batches={list(self.batches)} must be increasing, from 0"
        for buckets in self.buckets:
            if buckets != 1 and (buckets < 2 or buckets % 2):
                yield f"buckets={buckets} must be even, because a direction and its opposite are two codes; or 1"
        for share in self.blocks:
            if not 0 <= share <= 1:
                yield f"blocks={share} must be between 0 and 1, a share of the blocks"

    def layers(self, model: GPTConfig, layers: list[LayerSpec]) -> list[LayerSpec]:
        """Give every plain block hash-sparse attention, dense at first."""
        kernel = None if self.kernel == "auto" else self.kernel
        self._model = model
        self._sparse_layers = [i for i, spec in enumerate(layers) if spec.typename is Block]
        if not self._sparse_layers:
            raise ValueError("scenario sparse_attention finds no plain block: put it first among combined ones")
        specs = list(layers)
        for i in self._sparse_layers:
            specs[i] = LayerSpec(HashSparseBlock, model, hashing=self.hashing, kernel=kernel)
        return specs

    def buckets_of(self, layer: int, batch: int) -> int:
        """Return the number of buckets of a layer in a batch.

        Args:
            layer: index of a block, with no layer cut.
            batch: counted from 0.
        """
        entry = bisect_right(self.batches, batch) - 1
        if entry < 0:
            return 1
        num_sparse = round(self.blocks[entry] * len(self._sparse_layers))
        return self.buckets[entry] if layer in self._sparse_layers[:num_sparse] else 1

    def before_batch(self, engine: Engine, batch: int) -> None:
        """Draw the hashes of the local blocks that shall have new ones."""
        self._batch = batch
        draw = batch // self.redraw_every if self.redraw_every else 0
        wholes = self.whole_layers(engine)
        for index, attention in local_attentions(engine):
            layer = wholes[index]
            seed = random.Random(f"{self.seed} {layer} {draw}").getrandbits(63)
            attention.draw(self.buckets_of(layer, batch), seed)

    def report(self, engine: Engine) -> Report:
        """Report buckets and sparse blocks, and the computed pairs of all layers over dense attention's."""
        counted = {layer: attention.take_pairs() for layer, attention in local_attentions(engine)}
        wholes = self.whole_layers(engine)
        attentions = [wholes.index(layer) for layer in self._sparse_layers]  # the first of a block's parts
        pairs, dense = gather_by_layer(engine, counted, 2)[attentions].unbind(1)
        buckets = [self.buckets_of(layer, self._batch) for layer in self._sparse_layers]
        best = in_use(TASK, engine, self._model.hidden // self._model.heads)
        return {
            "buckets": max(buckets),
            "sparse blocks": f"{sum(n > 1 for n in buckets)} of {len(buckets)}",
            "pairs computed": f"{round(20 * float(pairs.sum() / dense.sum().clamp(min=1))) / 20:.0%}",
            "kernel": best if self.kernel == "auto" else self.kernel,
            "buckets by block": buckets,
            "pairs by block": pairs.long().tolist(),
            "density by block": [round(value, 4) for value in (pairs / dense.clamp(min=1)).tolist()],
        }


def local_attentions(engine: Engine) -> Iterator[tuple[int, HashSparseAttention]]:
    """Yield layer index and hash-sparse attention of this stage's blocks."""
    for layer, module in engine.local_layers().items():
        if isinstance(module, HashSparseBlock) and isinstance(module.attention, HashSparseAttention):
            yield layer, module.attention
