"""Which data a job trains on, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from scenarios.data.batches import SHUFFLES
from scenarios.data.stream import RAW_DTYPES
from scenarios.data.tokenizer import BYTES

FORMATS = ("pydoc", "text", "jsonl", "memmap", "megatron")
VALIDATION_BY = ("documents", "end")


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which data a job trains on.

    Attributes:
        path: a user's file or folder; ``None`` for the text that CPython ships.
        format: one of :data:`FORMATS`; ``None`` for what the path looks like: a prepared folder or an ``.npy`` file
            is a memory map, a ``.jsonl`` file JSON lines, an ``.idx`` file Megatron's, anything else text, or with
            ``dtype`` raw tokens.
        dtype: type of a raw memory map of tokens.
        text_key: where a JSON line has its text.
        tokenizer: ``"bytes"``, a JSON file of the ``tokenizers`` library, or a Hugging Face tokenizer's folder.
        end_of_document: token put after every document; ``None`` for the tokenizer's own, ``""`` for none.
        max_tokens: how much of the data is used, from its start; ``None`` for all.
        shuffle: ``"every_epoch"``, or ``"once"`` for epochs that are all the same.
        validation: share of the tokens that is not trained on; 0 for none.
        validation_by: ``"documents"`` for whole ones drawn from everywhere, ``"end"`` for the end of the stream;
            ``None`` for documents where the data has them.

    Raises:
        ValueError: naming all values that do not fit.
    """

    path: str | None = None
    format: str | None = None
    dtype: str | None = None
    text_key: str = "text"
    tokenizer: str = BYTES
    end_of_document: str | None = None
    max_tokens: int | None = None
    shuffle: str = "every_epoch"
    validation: float = 0.0
    validation_by: str | None = None

    def __post_init__(self) -> None:
        """Refuse what has no meaning, all problems at once."""
        problems = [
            f"data.{name}={value!r} must be one of {', '.join(choices)}"
            for name, value, choices in (
                ("format", self.format, FORMATS), ("dtype", self.dtype, RAW_DTYPES),
                ("shuffle", self.shuffle, SHUFFLES), ("validation_by", self.validation_by, VALIDATION_BY),
            ) if value is not None and value not in choices
        ]  # fmt: skip
        if self.max_tokens is not None and self.max_tokens < 1:
            problems.append(f"data.max_tokens={self.max_tokens} must be at least 1, or null for all")
        if not 0.0 <= self.validation < 1.0:
            problems.append(f"data.validation={self.validation} must be a share of the tokens, from 0 to below 1")
        if self.path is None and self.format not in (None, "pydoc"):
            problems.append(f"data.format={self.format} needs data.path: give a file or a folder")
        if self.path is not None and self.format == "pydoc":
            problems.append(f"data.format=pydoc has no data.path, which is {self.path}: give another data.format")
        if self.tokenizer != BYTES and (self.format in ("memmap", "megatron", "pydoc") or self.dtype):
            problems.append(
                f"data.tokenizer={self.tokenizer} is for text, but this data holds tokens or bytes already: leave it "
                f"at {BYTES}"
            )
        if self.dtype and self.format not in (None, "memmap"):
            problems.append(f"data.dtype={self.dtype} is for a raw memory map: set data.format=memmap, or leave it out")
        if problems:
            raise ValueError("; ".join(problems))
