"""From settings to streams of tokens."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from scenarios.data.megatron import read_megatron
from scenarios.data.memmap import is_prepared, read_prepared, read_raw
from scenarios.data.settings import DataSettings
from scenarios.data.split import split
from scenarios.data.stream import SCAN_TOKENS, Corpus, Tokens, check_ids, smallest_dtype
from scenarios.data.text import Piece, holds_json_lines, list_files, read_pieces
from scenarios.data.tokenizer import BYTES, Tokenizer, load_tokenizer

# More text is prepared once instead of being tokenized by every rank at every start.
TEXT_IN_MEMORY_BYTES = 64 << 20
_ENCODED_TOGETHER_BYTES = 1 << 20


def pydoc_tokens() -> NDArray[Any]:
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
) -> Any:
    """Read a whole stream of tokens, of bytes where it is text, without copying it where that is possible.

    Args:
        path: see :class:`DataSettings`.
        dtype: type of a raw memory map: ``uint8``, ``uint16`` or ``int32``.
        vocab_size: number of token ids that the model knows.
        max_tokens: length of the part that is used, from the start; ``None`` for all.

    Returns:
        A 1-D integer array (a memory map for files that hold tokens or are one text).

    Raises:
        ValueError: if the file is missing, empty, of another form, or holds an id that the model
            does not know; with the value, the rule and a remedy.
    """
    settings = DataSettings(path=None if path is None else str(path), dtype=dtype, max_tokens=max_tokens)
    return load_corpus(settings, vocab_size).tokens


def load_corpus(settings: DataSettings, vocab_size: int) -> Corpus:
    """Read the data of a job, all of it.

    Args:
        settings: which data.
        vocab_size: ids that the model knows.

    Returns:
        The stream, and where its documents end.

    Raises:
        ValueError: naming everything that is missing or does not fit.
    """
    problems = []
    tokenizer: Tokenizer | None = None
    kind = kind_of(settings)
    if kind in ("text", "jsonl"):
        try:
            tokenizer = fitting_tokenizer(settings, vocab_size)
        except ValueError as error:
            problems.append(str(error))
    try:
        corpus = _read(settings, kind, vocab_size, tokenizer).first(settings.max_tokens)
        check_ids(corpus.tokens[:SCAN_TOKENS], vocab_size, str(settings.path or "pydoc_data.topics"))
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))
    return corpus


def load_data(settings: DataSettings, vocab_size: int) -> tuple[Tokens, Tokens | None]:
    """Read the data of a job, divided into what is trained on and what is not; collective if there are ranks.

    Args:
        settings: which data.
        vocab_size: ids that the model knows.

    Returns:
        Tokens to train on, and tokens for validation, if any.

    Raises:
        ValueError: on every rank with the same text, if any of them can't read it, or they read different data.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return split(load_corpus(settings, vocab_size), settings.validation, settings.validation_by)
    message, found, parts = None, None, None
    try:
        corpus = load_corpus(settings, vocab_size)
        parts, found = split(corpus, settings.validation, settings.validation_by), _summary(corpus.tokens)
    except ValueError as error:
        message = str(error)
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, (message, found))
    complaint = _complaint([text for text, _ in answers], [summary for _, summary in answers])
    if complaint is not None:
        raise ValueError(complaint)
    assert parts is not None
    return parts


def _complaint(messages: list[str | None], found: list[tuple[int, str] | None]) -> str | None:
    """Say what is wrong on which ranks, if anything."""
    if len({*messages}) == 1 and messages[0] is not None:
        return messages[0]
    if any(messages):
        return "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None)
    if len({*found}) > 1:
        lengths = ", ".join(f"rank {rank} has {summary[0]}" for rank, summary in enumerate(found) if summary)
        return (
            f"the ranks read different data (tokens: {lengths}): data.path must name the same content on every node"
        )
    return None


def _summary(tokens: Tokens) -> tuple[int, str]:
    """Length, and a hash of some parts that are spread over the stream."""
    digest = hashlib.sha256()
    for start in np.linspace(0, max(0, len(tokens) - 4096), 64).astype(int):
        digest.update(np.ascontiguousarray(tokens[int(start) : int(start) + 4096], dtype=np.int64).tobytes())
    return len(tokens), digest.hexdigest()


def kind_of(settings: DataSettings) -> str:
    """Return the format, as configured or by what the path is."""
    if settings.format is not None:
        return settings.format
    if settings.path is None:
        return "pydoc"
    path = Path(settings.path).expanduser()
    if settings.dtype is not None or path.suffix == ".npy" or is_prepared(path):
        return "memmap"
    if path.suffix == ".idx" or (path.suffix == ".bin" and path.with_suffix(".idx").exists()):
        return "megatron"
    return "jsonl" if holds_json_lines(path, settings.text_key) else "text"


def fitting_tokenizer(settings: DataSettings, vocab_size: int | None = None) -> Tokenizer:
    """Load the tokenizer; raises ``ValueError`` if there is none or its vocabulary is larger than the model's."""
    tokenizer = load_tokenizer(settings.tokenizer, settings.end_of_document)
    # Bytes are checked as they are found: ASCII fits a model that knows 128.
    if vocab_size is not None and tokenizer.vocab_size > vocab_size and settings.tokenizer != BYTES:
        raise ValueError(
            f"data.tokenizer={settings.tokenizer} has {tokenizer.vocab_size} token ids, but model.vocab_size="
            f"{vocab_size}: set model.vocab_size={tokenizer.vocab_size}"
        )
    return tokenizer


def _read(settings: DataSettings, kind: str, vocab_size: int, tokenizer: Tokenizer | None) -> Corpus:
    if kind == "pydoc":
        return Corpus(tokens=pydoc_tokens())
    path = Path(str(settings.path)).expanduser()
    if kind == "megatron":
        return read_megatron(path)
    if kind == "memmap":
        return read_prepared(path, vocab_size) if path.is_dir() else Corpus(tokens=read_raw(path, settings.dtype))
    files = list_files(path)
    compressed = path.suffix in (".gz", ".bz2", ".xz")
    if kind == "text" and settings.tokenizer == BYTES and path.is_file() and not compressed:
        return Corpus(tokens=np.memmap(path, dtype=np.uint8, mode="r"))
    num_bytes = sum(file.stat().st_size for file in files)
    if num_bytes > TEXT_IN_MEMORY_BYTES and settings.max_tokens is None:
        raise ValueError(_too_long(settings, num_bytes))
    if tokenizer is None:  # its error is reported anyway
        return Corpus(tokens=np.zeros(0, dtype=np.uint8))
    pieces = read_pieces(files, json_lines=kind == "jsonl", text_key=settings.text_key)
    return _tokenize(pieces, tokenizer, files, settings)


def _tokenize(pieces: Iterator[Piece], tokenizer: Tokenizer, files: list[Path], settings: DataSettings) -> Corpus:
    """Tokenize text in memory."""
    parts, ends, length, text_bytes = [], [], 0, 0
    dtype = smallest_dtype(tokenizer.vocab_size)
    for group in in_groups(pieces):
        text_bytes += sum(len(piece.text) for piece in group)
        if text_bytes > TEXT_IN_MEMORY_BYTES:
            raise ValueError(_too_long(settings, text_bytes))
        for piece, ids in zip(group, encode(group, tokenizer, files), strict=True):
            parts.append(ids.astype(dtype))
            length += len(ids)
            if piece.ends_document:
                ends.append(length)
        if settings.max_tokens is not None and length >= settings.max_tokens:
            break
    if not length:
        raise ValueError(f"data.path={settings.path} is empty: there is nothing to train on")
    return Corpus(tokens=np.concatenate(parts), documents=np.array(ends, dtype=np.int64))


def in_groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Collect pieces that are tokenized in one call, about 1 MiB."""
    group: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        group.append(piece)
        num_bytes += len(piece.text)
        if num_bytes >= _ENCODED_TOGETHER_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def encode(group: list[Piece], tokenizer: Tokenizer, files: list[Path]) -> list[NDArray[np.int64]]:
    """Tokenize some pieces.

    Args:
        group: the pieces.
        tokenizer: each piece is tokenized on its own.
        files: what the pieces are of, for messages.

    Returns:
        Ids of each, with the end of the document where one ends.

    Raises:
        ValueError: if one is not UTF-8 and the tokenizer needs that.
    """
    try:
        encoded = tokenizer.encode([piece.text for piece in group])
    except UnicodeDecodeError as error:
        piece = next(piece for piece in group if piece.text == error.object)
        last = piece.after.file - (piece.after.offset == 0)
        raise ValueError(
            f"{files[last]} is not UTF-8 ({error.reason}, {error.object[error.start : error.end]!r}): convert it, or "
            f"set data.tokenizer={BYTES}"
        ) from error
    end = tokenizer.end_of_document
    if end is None:
        return encoded
    return [np.append(ids, end) if piece.ends_document else ids for piece, ids in zip(group, encoded, strict=True)]


def _too_long(settings: DataSettings, num_bytes: int) -> str:
    given = ["python", "-m", "scenarios.prepare", str(settings.path), "prepared", "--format", kind_of(settings)]
    if settings.tokenizer != BYTES:
        given += ["--tokenizer", settings.tokenizer]
    if settings.text_key != "text":
        given += ["--text-key", settings.text_key]
    if settings.end_of_document is not None:
        given += ["--end-of-document", settings.end_of_document]
    return (
        f"data.path={settings.path} has {num_bytes >> 20} MiB of text, and more than {TEXT_IN_MEMORY_BYTES >> 20} MiB "
        f"are not tokenized at every start: run '{shlex.join(given)}' once, then train with data=memmap "
        "data.path=prepared; or use a part, with data.max_tokens"
    )


