"""Cutting a stream of tokens into batches of next-token prediction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scenarios.data.stream import Tokens, check_ids

SHUFFLES = ("every_epoch", "once")


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
        for windows in self.windows(batch).reshape(self.shape.num_micro_batches, -1):
            yield _micro_batch(self._tokens, windows, self.shape.seq_len, self._vocab_size)

    def windows(self, batch: int) -> NDArray[np.int64]:
        """Say which windows this replica reads in a batch, in the order in which it reads them."""
        shape = self.shape
        epoch, index = divmod(batch, self.batches_per_epoch)
        chosen = self._permutation(epoch)[index * shape.samples : (index + 1) * shape.samples]
        by_replica = chosen.reshape(shape.num_micro_batches, shape.num_replicas, -1)
        return by_replica[:, shape.replica].reshape(-1)

    def _permutation(self, epoch: int) -> NDArray[np.int64]:
        if self._shuffle == "once":
            epoch = 0
        if self._order is None or self._order[0] != epoch:
            generator = np.random.default_rng((self._seed, epoch))
            self._order = epoch, generator.permutation(self._num_windows)
        return self._order[1]


class ValidationBatches:
    """Batches for evaluation: always the same windows, in the order of the stream.

    A batch may have fewer micro-batches than one of training, so that little is left out: less than one
    micro-batch a replica.

    Args:
        tokens: the stream.
        shape: how it is cut, as for training.
        vocab_size: ids are checked against it as they are read.
        max_batches: evaluate at most so many batches, of windows that are spread evenly over the stream;
            ``None`` for all of it.

    Raises:
        ValueError: if the stream is too short for one micro-batch on every replica.
    """

    def __init__(
        self, tokens: Tokens, shape: BatchShape, *, vocab_size: int = 256, max_batches: int | None = None
    ) -> None:
        self.shape = shape
        self._tokens = tokens
        self._vocab_size = vocab_size
        num_windows = (len(tokens) - 1) // shape.seq_len
        side_by_side = shape.micro_batch_size * shape.num_replicas
        groups = num_windows // side_by_side
        if groups < 1:
            raise ValueError(
                f"the validation part has {max(0, len(tokens))} tokens, but a micro-batch on every replica needs "
                f"{side_by_side * shape.seq_len + 1}: raise data.validation, or give more data"
            )
        if max_batches is not None:
            groups = min(groups, max_batches * shape.num_micro_batches)
        wanted = groups * side_by_side
        windows = np.arange(wanted, dtype=np.int64) * num_windows // wanted
        self._windows = windows.reshape(groups, shape.num_replicas, shape.micro_batch_size)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches on each replica, over all batches."""
        return len(self._windows)

    @property
    def tokens(self) -> int:
        """Tokens that are predicted, over all replicas."""
        return self._windows.size * self.shape.seq_len

    def __len__(self) -> int:
        """Number of batches; the last may be smaller."""
        return -(-self.num_micro_batches // self.shape.num_micro_batches)

    def windows(self, batch: int) -> NDArray[np.int64]:
        """Say which windows this replica reads in a batch: ``[num_micro_batches, micro_batch_size]``."""
        size = self.shape.num_micro_batches
        return self._windows[batch * size : (batch + 1) * size, self.shape.replica]

    def micro_batches(self, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this replica's micro-batches of one batch, as :meth:`TokenBatches.micro_batches` does."""
        for windows in self.windows(batch):
            yield _micro_batch(self._tokens, windows, self.shape.seq_len, self._vocab_size)


def _micro_batch(
    tokens: Tokens, windows: Sequence[int] | NDArray[np.int64], seq_len: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Read some windows as (inputs, labels)."""
    rows = np.stack([tokens[int(index) * seq_len : (int(index) + 1) * seq_len + 1] for index in windows])
    check_ids(rows, vocab_size, "the data")
    sample = torch.from_numpy(rows.astype(np.int64))
    return sample[:, :-1].contiguous(), sample[:, 1:].contiguous()
