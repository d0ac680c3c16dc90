"""Reading Megatron's indexed datasets: ``<prefix>.bin`` with the tokens, ``<prefix>.idx`` with their layout.

The index, little-endian: 9 bytes, ``MMIDIDX`` and two zero bytes; version (u64, 1); code of the tokens' type (u8);
number of sequences (u64); length of the document index (u64); then of all sequences the lengths in tokens (i32), then
where they begin in ``.bin``, in bytes (i64); then the document index (i64): the number of the first sequence of each
document, and at the end the number of sequences.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scenarios.data.stream import Corpus, TokenPieces

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Codes 6 and 7 are floats.
_DTYPES = {1: "uint8", 2: "int8", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def megatron_files(path: Path) -> tuple[Path, Path]:
    """Return ``.bin`` and ``.idx`` of a dataset that is named by either of them or by their common prefix."""
    prefix = str(path)[:-4] if path.suffix in (".bin", ".idx") else str(path)
    return Path(prefix + ".bin"), Path(prefix + ".idx")


def read_megatron(path: Path) -> Corpus:
    """Map a dataset into memory.

    Args:
        path: ``.bin``, ``.idx`` or their common prefix.

    Returns:
        All sequences one behind the other, and where the documents end.

    Raises:
        ValueError: if a file is missing, of another kind, or shorter than the index says.
    """
    data, index = megatron_files(path)
    for file in (data, index):
        if not file.is_file():
            raise ValueError(f"{file} does not exist: data.path={path} must name both a .bin and an .idx of Megatron")
    dtype, sizes, pointers, documents = _read_index(index)
    num_bytes = data.stat().st_size
    width = dtype.itemsize
    if len(sizes) == 0 or sizes.sum() == 0:
        raise ValueError(f"{index} lists no tokens: there is nothing to train on")
    ends = pointers + sizes * width
    if ends.max() > num_bytes or pointers.min() < 0 or (pointers % width).any():
        raise ValueError(
            f"{data} has {num_bytes} bytes, but {index} places tokens of {width} bytes up to byte {ends.max()}: the "
            "two do not belong together, or one is incomplete; copy both again"
        )
    tokens = np.memmap(data, dtype=dtype, mode="r", shape=(num_bytes // width,))
    starts = pointers // width
    joined = TokenPieces(tokens, starts, starts + sizes)
    sequence_ends = np.concatenate([[0], np.cumsum(sizes)])
    document_ends = np.unique(sequence_ends[documents])
    document_ends = document_ends[document_ends > 0]
    if len(document_ends) == 0 or document_ends[-1] != len(joined):
        document_ends = np.append(document_ends, len(joined))
    if (starts[0], len(joined)) == (0, len(tokens)) and (pointers[1:] == ends[:-1]).all():
        return Corpus(tokens=tokens, documents=document_ends)
    return Corpus(tokens=joined, documents=document_ends)


def _read_index(
    file: Path,
) -> tuple[np.dtype[np.generic], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return type, lengths, places in bytes and document index."""
    content = file.read_bytes()
    if content[:9] != _MAGIC:
        raise ValueError(
            f"{file} does not begin like a Megatron index: it must be written by preprocess_data with the 'mmap' "
            "format, which is the only one of newer versions"
        )
    if len(content) < _HEADER.size:
        raise ValueError(f"{file} ends within its header: copy it again")
    _, version, code, num_sequences, num_documents = _HEADER.unpack_from(content)
    if version != 1:
        raise ValueError(f"{file} has version {version}; only version 1 of Megatron's index can be read")
    if code not in _DTYPES:
        raise ValueError(f"{file} says that tokens have type {code}, which is none of integers: {sorted(_DTYPES)}")
    wanted = _HEADER.size + 12 * num_sequences + 8 * num_documents
    if len(content) < wanted:
        raise ValueError(f"{file} has {len(content)} bytes, but its header says {wanted}: copy it again")
    sizes = np.frombuffer(content, "<i4", num_sequences, _HEADER.size).astype(np.int64)
    pointers = np.frombuffer(content, "<i8", num_sequences, _HEADER.size + 4 * num_sequences).astype(np.int64)
    documents = np.frombuffer(content, "<i8", num_documents, wanted - 8 * num_documents).astype(np.int64)
    if (sizes < 0).any() or (documents < 0).any() or (documents > num_sequences).any():
        raise ValueError(f"{file} is damaged: it lists a negative length or a document outside the sequences")
    return np.dtype(_DTYPES[code]), sizes, pointers, documents
