"""Token streams for training: real text without a network, or a user's own data.

What a batch holds is a pure function of (seed, batch index), so two runs of one job see the same data whatever else
differs between them, and a run that is continued goes on where it was.

    settings.py   which data, as plain values        loading.py   from settings to streams
    text.py, tokenizer.py, memmap.py, megatron.py    what is read, one form each
    stream.py     what a stream is                   split.py     the part for validation
    batches.py    cutting a stream into batches
"""

from scenarios.data.batches import SHUFFLES, BatchShape, TokenBatches, ValidationBatches
from scenarios.data.loading import load_corpus, load_data, load_tokens, pydoc_tokens
from scenarios.data.settings import FORMATS, VALIDATION_BY, DataSettings
from scenarios.data.stream import RAW_DTYPES, Corpus, TokenPieces, Tokens

__all__ = [
    "FORMATS",
    "RAW_DTYPES",
    "SHUFFLES",
    "VALIDATION_BY",
    "BatchShape",
    "Corpus",
    "DataSettings",
    "TokenBatches",
    "TokenPieces",
    "Tokens",
    "ValidationBatches",
    "load_corpus",
    "load_data",
    "load_tokens",
    "pydoc_tokens",
]
