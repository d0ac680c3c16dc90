"""Reading tokens and cutting them into batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from scenarios.data import BatchShape, TokenBatches, load_tokens

SHAPE = BatchShape(seq_len=8, micro_batch_size=2, num_micro_batches=3)


def test_default_is_english_text() -> None:
    """The text inside CPython needs no network."""
    tokens = load_tokens()
    assert len(tokens) > 300_000
    assert b"statement" in tokens.tobytes()


def test_text_file_is_read_as_bytes(tmp_path: Path) -> None:
    """Bytes are the tokens, whatever the encoding."""
    path = tmp_path / "book.txt"
    path.write_bytes("naïve".encode())
    assert bytes(load_tokens(path)) == "naïve".encode()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32"])
def test_tokens_as_memory_maps(tmp_path: Path, dtype: str) -> None:
    """The same tokens as .npy and as raw bytes; neither is copied into memory."""
    tokens = np.arange(200, dtype=dtype)
    np.save(tmp_path / "tokens.npy", tokens)
    tokens.tofile(tmp_path / "tokens.bin")
    for found in (
        load_tokens(tmp_path / "tokens.npy"),
        load_tokens(tmp_path / "tokens.bin", dtype=dtype),
    ):
        assert isinstance(found, np.memmap)
        assert np.array_equal(found, tokens)


def test_missing_empty_and_wrong_files(tmp_path: Path) -> None:
    """Each message has the value, the rule and what to do."""
    with pytest.raises(ValueError, match="nowhere.txt does not exist: give a text file"):
        load_tokens(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="is a folder"):
        load_tokens(tmp_path)
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ValueError, match="empty.txt is empty"):
        load_tokens(empty)
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"123")
    with pytest.raises(ValueError, match="3 bytes, which is no multiple of the 2"):
        load_tokens(odd, dtype="uint16")
    with pytest.raises(ValueError, match="data.dtype='float32' must be one of uint8, uint16"):
        load_tokens(odd, dtype="float32")
    np.save(tmp_path / "floats.npy", np.zeros((2, 3)))
    with pytest.raises(ValueError, match=r"float64 of shape \(2, 3\); tokens must be a 1-D"):
        load_tokens(tmp_path / "floats.npy")
    (tmp_path / "broken.npy").write_bytes(b"not an array")
    with pytest.raises(ValueError, match="cannot be read as .npy"):
        load_tokens(tmp_path / "broken.npy")


def test_token_ids_must_be_known(tmp_path: Path) -> None:
    """An id outside the vocabulary is named, with the largest id allowed."""
    np.save(tmp_path / "high.npy", np.array([1, 300], dtype=np.uint16))
    with pytest.raises(ValueError, match="token id 300, but the model knows ids 0 to 255"):
        load_tokens(tmp_path / "high.npy")
    assert len(load_tokens(tmp_path / "high.npy", vocab_size=301)) == 2
    np.save(tmp_path / "low.npy", np.array([1, -4], dtype=np.int32))
    with pytest.raises(ValueError, match="token id -4"):
        load_tokens(tmp_path / "low.npy")


def test_ids_beyond_the_first_scan_are_checked_when_read() -> None:
    """Very large files are not scanned whole at the start."""
    data = TokenBatches(np.full(100, 70, dtype=np.uint8), SHAPE, vocab_size=64)
    with pytest.raises(ValueError, match="token id 70"):
        next(data.micro_batches(0))


def test_too_short_for_one_batch() -> None:
    """One batch needs different windows and one token more for the last label."""
    TokenBatches(np.zeros(49, dtype=np.uint8), SHAPE)
    with pytest.raises(ValueError, match="48 tokens, but one batch of 6 samples of 8 .* needs 49"):
        TokenBatches(np.zeros(48, dtype=np.uint8), SHAPE)


def test_labels_are_the_inputs_one_token_later() -> None:
    """Inputs are consecutive tokens; labels follow them."""
    data = TokenBatches(np.arange(200, dtype=np.uint8), SHAPE)
    micro_batches = list(data.micro_batches(0))
    assert len(micro_batches) == 3
    for inputs, labels in micro_batches:
        assert inputs.shape == labels.shape == (2, 8)
        assert inputs.dtype == labels.dtype == torch.int64
        assert torch.equal(inputs + 1, labels)
        assert torch.equal(inputs[:, 1:], labels[:, :-1])


def test_a_batch_depends_on_seed_and_index_alone() -> None:
    """Two runs that take turns, in any order, see the same data."""
    tokens = np.arange(256, dtype=np.uint8)

    def read(data: TokenBatches, batch: int) -> list[int]:
        return torch.cat([inputs for inputs, _ in data.micro_batches(batch)]).flatten().tolist()

    one, other = TokenBatches(tokens, SHAPE, seed=3), TokenBatches(tokens, SHAPE, seed=3)
    order = [0, 9, 4, 1, 17]
    assert [read(one, b) for b in order] == [read(other, b) for b in reversed(order)][::-1]
    assert read(one, 0) != read(TokenBatches(tokens, SHAPE, seed=4), 0)


def test_an_epoch_reads_every_window_once_over_all_replicas() -> None:
    """No overlap between replicas, none between the batches of an epoch; epochs differ in order."""
    shapes = [
        BatchShape(seq_len=8, micro_batch_size=2, num_micro_batches=3, num_replicas=2, replica=r)
        for r in range(2)
    ]
    tokens = np.zeros(8 * 36 + 1, dtype=np.uint8)
    replicas = [TokenBatches(tokens, shape) for shape in shapes]
    epochs = []
    for epoch in range(2):
        batches = range(epoch * 3, epoch * 3 + 3)
        seen = [int(w) for data in replicas for batch in batches for w in data.windows(batch)]
        assert sorted(seen) == list(range(36))
        epochs.append(seen)
    assert epochs[0] != epochs[1]


def test_more_replicas_read_the_same_batches() -> None:
    """Halving the micro-batches and doubling the replicas leaves what a batch holds."""
    tokens = np.arange(256, dtype=np.uint8)
    one = BatchShape(seq_len=8, micro_batch_size=2, num_micro_batches=4)
    two = [
        BatchShape(seq_len=8, micro_batch_size=2, num_micro_batches=2, num_replicas=2, replica=r)
        for r in range(2)
    ]
    assert one.samples == two[0].samples == 8
    assert one.tokens == 64
    alone = TokenBatches(tokens, one).windows(1)
    shared = np.concatenate([TokenBatches(tokens, shape).windows(1) for shape in two])
    assert sorted(alone) == sorted(shared)


def test_epochs_that_are_all_the_same() -> None:
    """Shuffled once, batches come again in the same order; shuffled anew, they never do."""
    tokens = np.arange(200, dtype=np.uint8)
    once = TokenBatches(tokens, SHAPE, shuffle="once")
    anew = TokenBatches(tokens, SHAPE)
    assert anew.repeats_after is None
    period = once.repeats_after
    assert period == once.batches_per_epoch == 4
    for batch in range(period):
        assert np.array_equal(once.windows(batch), once.windows(batch + period))
        assert np.array_equal(once.windows(batch), anew.windows(batch))
    assert any(not np.array_equal(anew.windows(b), anew.windows(b + period)) for b in range(period))
    with pytest.raises(ValueError, match="data.shuffle='never' must be one of every_epoch, once"):
        TokenBatches(tokens, SHAPE, shuffle="never")


def test_only_the_start_of_the_data() -> None:
    """So that epochs are short."""
    assert np.array_equal(load_tokens(max_tokens=100), load_tokens()[:100])
    with pytest.raises(ValueError, match="data.max_tokens=0 must be at least 1"):
        load_tokens(max_tokens=0)
