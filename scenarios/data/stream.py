"""What a stream of tokens is: an array, a memory map, or pieces of one that are read as if they were joined."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RAW_DTYPES = ("uint8", "uint16", "int32")
# A larger stream is not scanned whole at the start; the rest is checked as it is read.
SCAN_TOKENS = 1 << 26
_SCAN_STEP = 1 << 20


class TokenPieces:
    """Some pieces of an array of tokens, one behind the other, without copying them.

    Args:
        tokens: a 1-D integer array, usually a memory map; or such pieces themselves.
        starts: where each piece begins.
        stops: where each ends, exclusive.
    """

    def __init__(self, tokens: Tokens, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        kept = stops > starts
        starts, stops = starts[kept], stops[kept]
        if len(starts):  # pieces that touch are one piece
            first = np.concatenate([[True], starts[1:] != stops[:-1]])
            last = np.concatenate([first[1:], [True]])
            starts, stops = starts[first], stops[last]
        self._tokens = tokens
        self._starts = starts
        self._ends = np.cumsum(stops - starts)  # where each piece ends in the joined stream

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the tokens."""
        return self._tokens.dtype

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, part: slice) -> NDArray[Any]:
        """Read a slice of step 1, as an array."""
        start, stop, step = part.indices(len(self))
        if step != 1:
            raise ValueError(f"a stream of tokens can't be read in steps of {step}")
        found = []
        piece = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            end = int(self._ends[piece])
            before = int(self._ends[piece - 1]) if piece else 0
            offset = int(self._starts[piece]) - before
            found.append(self._tokens[start + offset : min(stop, end) + offset])
            start, piece = min(stop, end), piece + 1
        if not found:
            return self._tokens[:0]
        return found[0] if len(found) == 1 else np.concatenate(found)


Tokens = NDArray[Any] | TokenPieces


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A stream of tokens, and where its documents end.

    Attributes:
        tokens: the stream.
        documents: end of each document in the stream, exclusive, ascending; ``None`` if not known.
    """

    tokens: Tokens
    documents: NDArray[np.int64] | None = None

    def first(self, num_tokens: int | None) -> Corpus:
        """Return the start of it; all of it for ``None``."""
        if num_tokens is None or num_tokens >= len(self.tokens):
            return self
        ends = self.documents
        if ends is not None:
            ends = np.append(ends[ends < num_tokens], num_tokens)
        tokens = self.tokens
        if isinstance(tokens, TokenPieces):
            return Corpus(tokens=TokenPieces(tokens, np.array([0]), np.array([num_tokens])), documents=ends)
        return Corpus(tokens=tokens[:num_tokens], documents=ends)


def check_ids(tokens: Tokens, vocab_size: int, source: str) -> None:
    """Refuse token ids outside ``[0, vocab_size)``.

    Args:
        tokens: any number of them.
        vocab_size: ids that the model knows.
        source: name for the message.

    Raises:
        ValueError: naming the first id found that the model does not know.
    """
    for start in range(0, len(tokens), _SCAN_STEP):
        part = tokens[start : start + _SCAN_STEP]
        low, high = int(part.min()), int(part.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{source} holds token id {low if low < 0 else high}, but the model knows ids 0 to "
                f"{vocab_size - 1}: raise model.vocab_size or tokenize the text differently"
            )


def smallest_dtype(vocab_size: int) -> str:
    """Return the smallest type of :data:`RAW_DTYPES` that holds all ids of a vocabulary."""
    return "uint8" if vocab_size <= 1 << 8 else "uint16" if vocab_size <= 1 << 16 else "int32"


