"""Setting a part of the data aside for validation; the same part whatever the run's seed is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from scenarios.data.stream import Corpus, TokenPieces, Tokens

_SEED = 20_080_801


def split(corpus: Corpus, share: float, by: str | None = None) -> tuple[Tokens, Tokens | None]:
    """Divide a corpus into what is trained on and what is not; no token is in both.

    Args:
        corpus: the data.
        share: of the tokens that is set aside, at least; 0 for none.
        by: ``"documents"`` for whole documents, drawn at random with a fixed seed until the share is reached, each
            part in the order of the stream; ``"end"`` for the stream's end; ``None`` for documents where there are.

    Returns:
        Tokens to train on, and tokens for validation; ``None`` where the share is 0.

    Raises:
        ValueError: if there are no documents to divide by, or nothing is left to train on.
    """
    if not share:
        return corpus.tokens, None
    documents, total = corpus.documents, len(corpus.tokens)
    if by == "documents" and documents is None:
        raise ValueError(
            "data.validation_by=documents needs data that tells where documents end (a folder, JSON lines, Megatron's "
            "or a prepared folder): set data.validation_by=end"
        )
    if by == "documents" and documents is not None and len(documents) < 2:
        raise ValueError(
            f"data.validation_by=documents needs two documents at least, and there is {len(documents)}: set "
            "data.validation_by=end"
        )
    if by == "end" or documents is None or len(documents) < 2:
        start = total - max(1, int(share * total))
        return corpus.tokens[:start], corpus.tokens[start:]
    aside = _draw(np.diff(documents, prepend=0), share * total)
    starts = np.concatenate([[0], documents[:-1]])
    training, validation = (TokenPieces(corpus.tokens, starts[chosen], documents[chosen]) for chosen in (~aside, aside))
    if not len(training):
        raise ValueError(
            f"data.validation={share} takes all {len(documents)} documents: lower it, or set data.validation_by=end"
        )
    return training, validation


def _draw(sizes: NDArray[np.int64], wanted: float) -> NDArray[np.bool_]:
    """Mark documents, in a random order, until they have so many tokens."""
    order = np.random.default_rng(_SEED).permutation(len(sizes))
    before = np.cumsum(sizes[order]) - sizes[order]
    aside = np.zeros(len(sizes), dtype=bool)
    aside[order[before < wanted]] = True
    return aside
