"""Memory maps of tokens: ``.npy`` files, raw files, and the folders that ``scenarios.prepare`` writes.

A prepared folder holds ``tokens.npy`` (1-D), ``documents.npy`` (int64, where each document ends) and ``prepared.json``
(what it was made of, and how large the vocabulary is). The last is written last: without it the folder is incomplete.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scenarios.data.stream import RAW_DTYPES, Corpus

TOKENS, DOCUMENTS, PREPARED, PROGRESS = "tokens.npy", "documents.npy", "prepared.json", "progress.json"
HEADER_BYTES = 128


def npy_header(dtype: np.dtype[Any], length: int) -> bytes:
    """Make the first :data:`HEADER_BYTES` bytes of an ``.npy`` file (format 1.0) of a 1-D array.

    Args:
        dtype: type of the array.
        length: number of elements; the header is as long for any.
    """
    text = f"{{'descr': '{dtype.str}', 'fortran_order': False, 'shape': ({length},), }}"
    body = text.ljust(HEADER_BYTES - 11) + "\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body.encode()


def is_prepared(path: Path) -> bool:
    """Say whether a folder was written by ``scenarios.prepare``, completely or not."""
    return path.is_dir() and any((path / name).exists() for name in (PREPARED, PROGRESS))


def read_prepared(folder: Path, vocab_size: int) -> Corpus:
    """Map a prepared folder into memory.

    Args:
        folder: as written by ``scenarios.prepare``.
        vocab_size: ids that the model knows.

    Raises:
        ValueError: if it is incomplete, damaged, or its vocabulary is larger than the model's.
    """
    try:
        made = json.loads((folder / PREPARED).read_text(encoding="utf-8"))
        needed, length = int(made["vocab_size"]), int(made["num_tokens"])
    except FileNotFoundError as error:
        raise ValueError(
            f"data.path={folder} has no {PREPARED}: it is not of scenarios.prepare, or that was interrupted; run the "
            "same command again, which continues it"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / PREPARED} is damaged ({error}): prepare the data again, with --restart") from error
    if needed > vocab_size:
        raise ValueError(
            f"data.path={folder} was made with {needed} token ids, but model.vocab_size={vocab_size}: set "
            f"model.vocab_size={needed}"
        )
    tokens, documents = _open_npy(folder / TOKENS), _open_npy(folder / DOCUMENTS)
    if len(tokens) != length or (len(documents) and documents[-1] != length):
        raise ValueError(
            f"data.path={folder} has {len(tokens)} tokens, but {PREPARED} says {length}: it is not a complete copy"
        )
    return Corpus(tokens=tokens, documents=np.asarray(documents))


def read_raw(path: Path, dtype: str | None) -> NDArray[Any]:
    """Map an ``.npy`` file, or a raw file of tokens, into memory.

    Args:
        path: the file.
        dtype: type of raw tokens, one of :data:`RAW_DTYPES`.

    Raises:
        ValueError: if it is missing, empty or of another form.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise ValueError(
            f"data.path={path} {what}: give a text file, an .npy file or raw tokens (or a folder that "
            "scenarios.prepare wrote)"
        )
    if path.stat().st_size == 0:
        raise ValueError(f"data.path={path} is empty: there is nothing to train on")
    if path.suffix == ".npy":
        return _open_npy(path)
    if dtype not in RAW_DTYPES:
        raise ValueError(f"data.dtype={dtype!r} must be one of {', '.join(RAW_DTYPES)}, to read {path} as raw tokens")
    width = np.dtype(dtype).itemsize
    if path.stat().st_size % width:
        raise ValueError(
            f"data.path={path} has {path.stat().st_size} bytes, which is no multiple of the "
            f"{width} bytes of a {dtype}: check data.dtype"
        )
    return np.memmap(path, dtype=dtype, mode="r")


def _open_npy(path: Path) -> NDArray[Any]:
    """Map an ``.npy`` file into memory."""
    try:
        tokens: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"data.path={path} cannot be read as .npy: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ValueError(
            f"data.path={path} holds {tokens.dtype} of shape {tokens.shape}; tokens must be a 1-D "
            "array of integers"
        )
    return tokens
