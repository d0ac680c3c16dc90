"""Token streams for training: real text without a network, or a user's own file.

What a batch holds is a pure function of (seed, batch index), so two runs of one job see the same
data whatever else differs between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Tokens = NDArray[Any]

RAW_DTYPES = ("uint8", "uint16", "int32")
SHUFFLES = ("every_epoch", "once")
# A larger file is not scanned whole at the start; the rest is checked as it is read.
_SCAN_TOKENS = 1 << 26


def pydoc_tokens() -> Tokens:
    """Read the English text that CPython ships: the language reference behind ``help()``.

    Returns:
        About half a million bytes of text (the size depends on the Python version) as ``uint8``.
    """
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[key] for key in sorted(topics.topics))
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8)


def load_tokens(
    path: str | Path | None = None,
    *,
    dtype: str | None = None,
    vocab_size: int = 256,
    max_tokens: int | None = None,
) -> Tokens:
    """Read a stream of tokens without copying it into memory.

    Args:
        path: ``None`` for :func:`pydoc_tokens`; a ``.npy`` file with a 1-D array of integers; with
            ``dtype`` a raw memory map of tokens; else a text file, whose bytes are the tokens.
        dtype: type of a raw memory map: ``uint8``, ``uint16`` or ``int32``.
        vocab_size: number of token ids that the model knows.
        max_tokens: length of the part that is used, from the start; ``None`` for all.

    Returns:
        A 1-D integer array (a memory map for files).

    Raises:
        ValueError: if the file is missing, empty, of another form, or holds an id that the model
            does not know; with the value, the rule and a remedy.
    """
    if path is None:
        tokens = pydoc_tokens()
    else:
        tokens = _open(Path(path).expanduser(), dtype)
    if max_tokens is not None:
        if max_tokens < 1:
            raise ValueError(f"data.max_tokens={max_tokens} must be at least 1, or null for all")
        tokens = tokens[:max_tokens]
    _check_ids(tokens[:_SCAN_TOKENS], vocab_size, str(path or "pydoc_data.topics"))
    return tokens


def _open(path: Path, dtype: str | None) -> Tokens:
    """Map a user's file into memory."""
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(f"data.path={path} {what}: give a text file, an .npy file or raw tokens")
    if path.stat().st_size == 0:
        raise ValueError(f"data.path={path} is empty: there is nothing to train on")
    if path.suffix == ".npy":
        return _open_npy(path)
    if dtype is None:
        return np.memmap(path, dtype=np.uint8, mode="r")
    if dtype not in RAW_DTYPES:
        raise ValueError(f"data.dtype={dtype!r} must be one of {', '.join(RAW_DTYPES)}")
    width = np.dtype(dtype).itemsize
    if path.stat().st_size % width:
        raise ValueError(
            f"data.path={path} has {path.stat().st_size} bytes, which is no multiple of the "
            f"{width} bytes of a {dtype}: check data.dtype"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _open_npy(path: Path) -> Tokens:
    """Map an ``.npy`` file into memory."""
    try:
        tokens: Tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"data.path={path} cannot be read as .npy: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"data.path={path} holds {tokens.dtype} of shape {tokens.shape}; tokens must be a 1-D "
            "array of integers"
        )
    return tokens


def _check_ids(tokens: Tokens, vocab_size: int, source: str) -> None:
    """Refuse token ids outside ``[0, vocab_size)``."""
    if tokens.size == 0:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{source} holds token id {low if low < 0 else high}, but the model knows ids 0 to "
            f"{vocab_size - 1}: raise model.vocab_size or tokenize the text differently"
        )


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How tokens are cut into batches.

    Attributes:
        seq_len: tokens a sample.
        micro_batch_size: samples a micro-batch.
        num_micro_batches: micro-batches a batch, on each replica.
        num_replicas: data-parallel replicas.
        replica: this process's replica, ``0 .. num_replicas - 1``.
    """

    seq_len: int
    micro_batch_size: int
    num_micro_batches: int
    num_replicas: int = 1
    replica: int = 0

    @property
    def samples(self) -> int:
        """Samples a batch, over all replicas."""
        return self.micro_batch_size * self.num_micro_batches * self.num_replicas

    @property
    def tokens(self) -> int:
        """Tokens a batch, over all replicas."""
        return self.samples * self.seq_len


class TokenBatches:
    """Batches of next-token prediction in a fixed shuffled order.

    The stream is cut into windows of ``seq_len`` tokens; an epoch is one seeded permutation of
    them, another one each time or always the same. Replicas take different windows; no window is
    seen twice in an epoch.

    Args:
        tokens: the stream.
        shape: how it is cut.
        seed: of the permutations.
        vocab_size: ids are checked against it as they are read.
        shuffle: ``"every_epoch"``, or ``"once"`` for epochs that are all the same.

    Raises:
        ValueError: if the stream is too short for one batch of different windows.
    """

    def __init__(
        self, tokens: Tokens, shape: BatchShape, *, seed: int = 0, vocab_size: int = 256,
        shuffle: str = "every_epoch",
    ) -> None:  # fmt: skip
        if shuffle not in SHUFFLES:
            raise ValueError(f"data.shuffle={shuffle!r} must be one of {', '.join(SHUFFLES)}")
        self.shape = shape
        self._shuffle = shuffle
        self._tokens = tokens
        self._seed = seed
        self._vocab_size = vocab_size
        self._num_windows = (len(tokens) - 1) // shape.seq_len
        if self._num_windows < shape.samples:
            raise ValueError(
                f"the data has {len(tokens)} tokens, but one batch of {shape.samples} samples of "
                f"{shape.seq_len} tokens needs {shape.tokens + 1}: give a longer file, a shorter "
                "model.seq_len or a smaller batch"
            )
        self._order: tuple[int, NDArray[np.int64]] | None = None

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in one pass over the data; the remainder of an epoch is left out."""
        return self._num_windows // self.shape.samples

    @property
    def repeats_after(self) -> int | None:
        """Batches after which the same ones come again, in the same order; ``None`` if never."""
        return self.batches_per_epoch if self._shuffle == "once" else None

    def micro_batches(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this replica's micro-batches of one batch.

        Args:
            batch: index, from 0, without end.

        Yields:
            Inputs and labels, each ``[micro_batch_size, seq_len]`` of ``int64``; labels are the
            inputs one token later.
        """
        shape = self.shape
        for windows in self.windows(batch).reshape(shape.num_micro_batches, -1):
            rows = np.stack([self._window(int(index)) for index in windows])
            _check_ids(rows, self._vocab_size, "the data")
            sample = torch.from_numpy(rows.astype(np.int64))
            yield sample[:, :-1].contiguous(), sample[:, 1:].contiguous()

    def windows(self, batch: int) -> NDArray[np.int64]:
        """Say which windows this replica reads in a batch, in the order in which it reads them."""
        shape = self.shape
        epoch, index = divmod(batch, self.batches_per_epoch)
        chosen = self._permutation(epoch)[index * shape.samples : (index + 1) * shape.samples]
        by_replica = chosen.reshape(shape.num_micro_batches, shape.num_replicas, -1)
        return by_replica[:, shape.replica].reshape(-1)

    def _window(self, index: int) -> Tokens:
        start = index * self.shape.seq_len
        return self._tokens[start : start + self.shape.seq_len + 1]

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._shuffle == "once":
            epoch = 0
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng((self._seed, epoch))
            self._order = epoch, generator.permutation(self._num_windows)
        return self._order[1]
