"""The part for validation, its batches, and settings that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scenarios.data import (
    BatchShape,
    Corpus,
    DataSettings,
    TokenBatches,
    TokenPieces,
    ValidationBatches,
    load_data,
)
from scenarios.data.loading import _complaint
from scenarios.data.split import split
from tests.scenarios.data_files import write_megatron

ENDS = np.cumsum(np.random.default_rng(1).integers(1, 40, size=200))
CORPUS = Corpus(tokens=np.arange(int(ENDS[-1]), dtype=np.int32), documents=ENDS)


def read(tokens: Any) -> list[int]:
    return tokens[0 : len(tokens)].tolist()


def test_whole_documents_are_set_aside() -> None:
    """From everywhere, each in one part, in the order of the stream; a little more than the share."""
    training, validation = split(CORPUS, 0.1, "documents")
    assert validation is not None
    trained, evaluated = set(read(training)), set(read(validation))
    assert not trained & evaluated and trained | evaluated == set(range(len(CORPUS.tokens)))
    assert read(training) == sorted(trained) and read(validation) == sorted(evaluated)
    starts = [0, *ENDS[:-1].tolist()]
    for start, end in zip(starts, ENDS.tolist(), strict=True):
        assert len({token in evaluated for token in range(start, end)}) == 1
    assert 0.1 <= len(evaluated) / len(CORPUS.tokens) < 0.1 + 40 / len(CORPUS.tokens)
    assert min(evaluated) < 0.2 * len(CORPUS.tokens) and max(evaluated) > 0.8 * len(CORPUS.tokens)
    assert [read(part) for part in split(CORPUS, 0.1)] == [read(training), read(validation)], "the same every time"


def test_the_end_of_the_stream_is_set_aside() -> None:
    """Where asked to, or where no documents are known."""
    for corpus, by in ((CORPUS, "end"), (Corpus(tokens=CORPUS.tokens), None)):
        training, validation = split(corpus, 0.25, by)
        assert validation is not None and len(validation) == len(CORPUS.tokens) // 4
        assert read(training) + read(validation) == read(CORPUS.tokens)
    training, validation = split(CORPUS, 0.0)
    assert training is CORPUS.tokens and validation is None


def test_parts_of_parts(tmp_path: Path) -> None:
    """Documents of a dataset with gaps: pieces of pieces, read as slices of the joined stream."""
    documents = [[list(range(i * 10, i * 10 + 3)), list(range(i * 10 + 3, i * 10 + 7))] for i in range(12)]
    write_megatron(tmp_path / "m", documents, gap=b"\xff\xff")
    settings = DataSettings(path=str(tmp_path / "m.idx"), validation=0.3)
    training, validation = load_data(settings, 256)
    assert isinstance(training, TokenPieces) and isinstance(validation, TokenPieces)
    every = [token for document in documents for sequence in document for token in sequence]
    assert sorted(read(training) + read(validation)) == every
    whole = read(training)
    for start in range(0, len(whole), 3):
        assert training[start : start + 11].tolist() == whole[start : start + 11]
    shape = BatchShape(seq_len=4, micro_batch_size=2, num_micro_batches=2)
    from_pieces, from_array = (TokenBatches(tokens, shape) for tokens in (training, np.array(whole)))
    for (a, b), (c, d) in zip(from_pieces.micro_batches(1), from_array.micro_batches(1), strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)


def test_splits_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="needs data that tells where documents end .*set data.validation_by=end"):
        split(Corpus(tokens=CORPUS.tokens), 0.1, "documents")
    one = Corpus(tokens=CORPUS.tokens, documents=np.array([len(CORPUS.tokens)]))
    with pytest.raises(ValueError, match="needs two documents at least, and there is 1"):
        split(one, 0.1, "documents")
    with pytest.raises(ValueError, match="data.validation=0.99 takes all 2 documents: lower it"):
        split(Corpus(tokens=CORPUS.tokens, documents=np.array([10, 20])), 0.99)


def test_validation_batches() -> None:
    """All windows but less than a micro-batch a replica, in order; the same ones whatever the number of replicas."""
    tokens = np.arange(8 * 27 + 1, dtype=np.uint8)
    shapes = [
        BatchShape(seq_len=8, micro_batch_size=2, num_micro_batches=3, num_replicas=2, replica=r) for r in range(2)
    ]
    both = [ValidationBatches(tokens, shape) for shape in shapes]
    seen = [window for data in both for batch in range(len(data)) for window in data.windows(batch).flatten()]
    assert sorted(seen) == [w * 27 // 24 for w in range(24)] and len(both[0]) == 2
    assert [len(both[0].windows(batch)) for batch in range(2)] == [3, 3]
    alone = ValidationBatches(tokens, BatchShape(seq_len=8, micro_batch_size=2, num_micro_batches=5))
    assert [len(alone.windows(batch)) for batch in range(3)] == [5, 5, 3] and len(alone) == 3
    inputs, labels = next(iter(alone.micro_batches(1)))
    assert inputs.tolist() == [list(range(w * 8, w * 8 + 8)) for w in (10, 11)] and torch.equal(labels, inputs + 1)
    assert alone.tokens == 26 * 8 and list(alone.micro_batches(2))[-1][1].shape == (2, 8)


def test_few_validation_batches_are_spread_evenly() -> None:
    tokens = np.zeros(8 * 120 + 1, dtype=np.uint8)
    few = ValidationBatches(tokens, BatchShape(seq_len=8, micro_batch_size=2, num_micro_batches=3), max_batches=2)
    assert len(few) == 2
    assert np.concatenate([few.windows(batch) for batch in range(2)]).flatten().tolist() == list(range(0, 120, 10))
    with pytest.raises(ValueError, match="validation part has 16 tokens, but .* needs 17: raise data.validation"):
        ValidationBatches(tokens[:16], BatchShape(seq_len=8, micro_batch_size=2, num_micro_batches=3))


def test_settings_that_do_not_fit() -> None:
    """All problems in one message, each with value, rule and remedy."""
    with pytest.raises(ValueError) as raised:
        DataSettings(format="parquet", shuffle="never", max_tokens=0, validation=1.0, validation_by="line")
    for part in (
        "data.format='parquet' must be one of pydoc, text, jsonl, memmap, megatron", "data.shuffle='never'",
        "data.max_tokens=0 must be at least 1", "data.validation=1.0 must be a share", "data.validation_by='line'",
        "data.format=parquet needs data.path",
    ):  # fmt: skip
        assert part in str(raised.value)
    with pytest.raises(ValueError, match="data.tokenizer=t.json is for text, but this data holds tokens"):
        DataSettings(path="a", format="megatron", tokenizer="t.json")
    with pytest.raises(ValueError, match="data.dtype=uint16 is for a raw memory map: set data.format=memmap"):
        DataSettings(path="a", format="jsonl", dtype="uint16")
    with pytest.raises(ValueError, match="data.format=pydoc has no data.path, which is a"):
        DataSettings(path="a", format="pydoc")


def test_ranks_that_read_different_data() -> None:
    """One text for all: what is wrong, and where, unless it is the same everywhere."""
    assert _complaint([None, None], [(3, "a"), (3, "a")]) is None
    assert _complaint(["gone", "gone"], [None, None]) == "gone"
    assert _complaint([None, "gone"], [(3, "a"), None]) == "rank 1: gone"
    different = _complaint([None, None], [(3, "a"), (4, "b")])
    assert different is not None and "tokens: rank 0 has 3, rank 1 has 4" in different
