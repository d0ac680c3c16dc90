"""What a large vocabulary costs a pipeline, and what cutting the head would change.

    python -m benchmarks.planner.head        # seconds

The head multiplies the stream by one row a token id, so with a large vocabulary it is the dearest layer. The first
table says how it compares with a block, and how much longer the slowest stage of the best cut is than an even share:
with whole blocks, with halves, and with a head that is cut into parts as dear as a half block at most. The second
says why the head is not cut: the loss of a head in parts rounds otherwise, and so do the gradients.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.record import in_words, installed, table
from dynpipe_ds.partition import optimal

HIDDEN, LENGTH, BLOCKS = 4096, 2048, 32
VOCABULARIES = (32_000, 64_000, 128_000, 256_000)
STAGES = (4, 8, 16, 24)
MLP = 16 * HIDDEN**2 / (24 * HIDDEN**2 + 4 * LENGTH * HIDDEN)
"""Share of a block's operations that is in its MLP: 16 h^2 of 24 h^2 + 4 n h a token."""


def blocks_worth(vocabulary: int) -> float:
    """How many blocks a head costs: 2 h V operations a token.

    Args:
        vocabulary: V.
    """
    return 2 * HIDDEN * vocabulary / (24 * HIDDEN**2 + 4 * LENGTH * HIDDEN)


def over_even(costs: list[float], num_stages: int) -> float:
    """Slowest stage of the best cut over an even share.

    Args:
        costs: of the layers.
        num_stages: S.
    """
    cuts = optimal(costs, num_stages).boundaries
    slowest = max(math.fsum(costs[a:b]) for a, b in zip(cuts, cuts[1:], strict=False))
    return slowest / (math.fsum(costs) / num_stages)


def layers(vocabulary: int, *, halves: bool, head_parts: bool) -> list[float]:
    """Costs of the model's layers, in blocks; the embedding looks rows up, and costs next to nothing.

    Args:
        vocabulary: V.
        halves: whether attention and MLP are two layers.
        head_parts: whether the head is cut into parts no dearer than an MLP.
    """
    blocks = [1 - MLP, MLP] * BLOCKS if halves else [1.0] * BLOCKS
    head = blocks_worth(vocabulary)
    count = math.ceil(head / MLP) if head_parts else 1
    return [0.01, *blocks, *[head / count] * count]


def loss_in_parts(stream: Tensor, weight: Tensor, labels: Tensor, num_parts: int) -> Tensor:
    """Cross entropy of a head whose parts run one after another, as pipeline layers would.

    Args:
        stream: ``[tokens, hidden]``.
        weight: ``[vocabulary, hidden]``.
        labels: ``[tokens]``.
        num_parts: of the vocabulary.
    """
    total = torch.full(labels.shape, -math.inf)
    wanted = torch.zeros(labels.shape)
    first = 0
    for part in weight.chunk(num_parts):
        logits = stream @ part.t()
        total = torch.logaddexp(total, logits.logsumexp(1))
        inside = (labels >= first) & (labels < first + len(part))
        own = (labels - first).clamp(0, len(part) - 1)
        wanted = wanted + torch.where(inside, logits.gather(1, own[:, None])[:, 0], 0.0)
        first += len(part)
    return (total - wanted).mean()


def rounding(vocabulary: int, num_parts: int, tokens: int = 64, hidden: int = 128) -> tuple[float, float]:
    """Relative differences to the whole head: of the loss, and the largest of the stream's gradient.

    Args:
        vocabulary: V.
        num_parts: of the head.
        tokens: of a micro-batch.
        hidden: width.
    """
    torch.manual_seed(0)
    weight, labels = torch.randn(vocabulary, hidden) * 0.05, torch.randint(vocabulary, (tokens,))
    found = []
    for parts in (1, num_parts):
        stream = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if parts == 1:
            loss = F.cross_entropy(stream @ weight.t(), labels)
        else:
            loss = loss_in_parts(stream, weight, labels, parts)
        loss.backward()
        found.append((loss.detach(), stream.grad))
    (whole, expected), (cut, gradient) = found
    assert expected is not None and gradient is not None
    return float((cut - whole).abs() / whole), float((gradient - expected).abs().max() / expected.abs().max())


def main() -> None:
    """Print both tables."""
    print(in_words(installed()), end="\n\n")
    kinds = {"whole blocks": (False, False), "halves": (True, False), "halves, head in parts": (True, True)}
    rows = [
        [f"{vocabulary:,}", f"{blocks_worth(vocabulary):.1f}", name,
         *(f"{over_even(layers(vocabulary, halves=h, head_parts=p), stages):.2f}" for stages in STAGES)]
        for vocabulary in VOCABULARIES for name, (h, p) in kinds.items()
    ]  # fmt: skip
    print(f"{BLOCKS} blocks of hidden size {HIDDEN:,}, {LENGTH:,} tokens; slowest stage over an even share\n")
    print(table(["vocabulary", "head, in blocks", "layers", *(f"{stages} stages" for stages in STAGES)], rows))
    print("\nRelative difference of a head in parts to the whole one, float32\n")
    found = [[f"{v:,}", "4", *(f"{error:.1e}" for error in rounding(v, 4))] for v in VOCABULARIES]
    print(table(["vocabulary", "parts", "loss", "gradient of the stream"], found))


if __name__ == "__main__":
    main()
