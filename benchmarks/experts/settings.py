"""The paper's models, clusters and loads; what the paper does not give is ours, and says so."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scenarios.moe.placing import Constants
from scenarios.moe.placing.constants import Agg

BYTES = 4  # ours: fp32
SEQUENCE = 1024  # ours: the paper gives tokens of an iteration only
PIECE_BYTES = 2.0**20  # ours: what a chain forwards at a time
MESSAGE_S = 10e-6  # ours
ZIPF = 1.1  # ours: the three fullest of 16 experts have 58% of the rows; the paper says more than 50% (section II-A)
SPREAD = 0.5  # ours: standard deviation of what drifts, in logs of an expert's share
KEPT = {"slow": 0.999, "fast": 0.8}  # ours: what is left of it after a batch


@dataclass(frozen=True)
class Model:
    """A MoE-GPT of the paper's Table III.

    Args:
        layers: blocks, each with experts.
        embedding: the paper's word for the model's width.
        hidden: width inside an expert.
    """

    layers: int
    embedding: int
    hidden: int


MODELS = {
    "S": Model(12, 512, 1024), "M": Model(12, 1024, 2048), "L": Model(12, 2048, 4096), "DS": Model(24, 512, 1024),
    "DM": Model(24, 1024, 2048),
}  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Nodes of four GPUs with 100 Gb/s between them (section VI); speeds are ours.

    Args:
        flops: operations a second of a GPU in training.
        inside_bytes_s: bytes a second between two GPUs of a node.
        partner_bytes_s: the same to the GPU at the other end of an NVLink; ``None`` without.
    """

    flops: float
    inside_bytes_s: float = 6e9
    partner_bytes_s: float | None = None

    def byte_s(self, num_ranks: int) -> float:
        """Seconds of a byte where every rank sends as much to each other: the node's link is shared by its four.

        Args:
            num_ranks: R.
        """
        outside = max(0, num_ranks - 4) / (num_ranks - 1)
        inside = 1 - outside
        partner = 1 / (num_ranks - 1) if self.partner_bytes_s else 0.0
        seconds = outside / (100e9 / 8 / 4) + (inside - partner) / self.inside_bytes_s
        return seconds + (partner / self.partner_bytes_s if self.partner_bytes_s else 0.0)


CLUSTERS = {
    "HPWNV": Cluster(10e12),  # four 3090 over PCI-Express
    "HPNV": Cluster(10e12, partner_bytes_s=50e9),  # four 3090, NVLink between two and two
    "LPWNV": Cluster(5e12),  # four 2080Ti
}


@dataclass(frozen=True)
class Setting:
    """One row of a table.

    Args:
        model: a key of :data:`MODELS`.
        cluster: a key of :data:`CLUSTERS`.
        num_ranks: R.
        num_experts: E.
        top_k: experts a token.
        tokens: of a rank in a batch.
        drift: a key of :data:`KEPT`.
        agg: see :class:`~scenarios.moe.placing.Constants`.
    """

    model: str
    cluster: str
    num_ranks: int
    num_experts: int
    top_k: int
    tokens: int
    drift: str = "slow"
    agg: Agg = "sums"

    def constants(self) -> Constants:
        """Seconds and bytes of a layer: 2 products of an expert, 4 of attention and its scores; backward twice."""
        model, cluster = MODELS[self.model], CLUSTERS[self.cluster]
        width, inner = model.embedding, model.hidden
        rest_s = self.tokens * (8 * width * width + 4 * SEQUENCE * width) / cluster.flops
        return Constants(
            forward_row_s=4 * width * inner / cluster.flops, row_bytes=BYTES * width,
            byte_s=cluster.byte_s(self.num_ranks), expert_bytes=BYTES * 2 * width * inner, message_s=MESSAGE_S,
            piece_bytes=PIECE_BYTES, rest_forward_s=rest_s, rest_backward_s=2 * rest_s, agg=self.agg,
        )  # fmt: skip

    def loads(self, layer: int, batches: int) -> Iterator[np.ndarray]:
        """Draw what a layer routes, batch by batch: rows of each source for each expert, ``[R, E]``.

        The same for every cluster and way of Agg.

        Args:
            layer: each has an order of experts of its own.
            batches: how many.
        """
        name = f"{self.model} {self.num_ranks} {self.num_experts} {self.top_k} {self.tokens} {self.drift} {layer}"
        draw = np.random.default_rng(zlib.crc32(name.encode()))
        usual = -ZIPF * np.log(draw.permutation(np.arange(1, self.num_experts + 1)))
        kept, drifted = KEPT[self.drift], SPREAD * draw.standard_normal(self.num_experts)
        for _ in range(batches):
            shares = np.exp(usual + drifted)
            yield _routed(draw, shares / shares.sum(), self)
            drifted = kept * drifted + (1 - kept**2) ** 0.5 * SPREAD * draw.standard_normal(self.num_experts)


def _routed(draw: np.random.Generator, shares: np.ndarray, setting: Setting) -> np.ndarray:
    """First choices by the shares; second ones by the shares of the others."""
    first = draw.multinomial(setting.tokens, np.tile(shares, (setting.num_ranks, 1)))
    if setting.top_k == 1:
        return first
    others = np.tile(shares, (setting.num_experts, 1))
    np.fill_diagonal(others, 0.0)
    others /= others.sum(axis=1, keepdims=True)
    return first + draw.multinomial(first, others).sum(axis=1)
