"""Reading documents from text files, folders of them, and JSON lines, from any place on.

A *piece* is what is tokenized at once: a whole document of JSON lines, or at most a few MiB of a text file. Where
pieces end depends on the text alone, so that who stops between two of them and goes on gets the same tokens.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_BLOCK_BYTES = 1 << 20
# A line that is longer is cut between two characters.
_LINE_BYTES = 4 << 20

_OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}


@dataclass(frozen=True, order=True)
class Position:
    """A place in a list of files: index of the file, and bytes into it (of what it holds, if compressed)."""

    file: int = 0
    offset: int = 0


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some text.

    Attributes:
        text: UTF-8, or any bytes.
        ends_document: whether a document ends here.
        after: where the next piece begins.
    """

    text: bytes
    ends_document: bool
    after: Position


def list_files(path: Path) -> list[Path]:
    """List a file, or all files of a folder and its sub-folders in the order of their names.

    Args:
        path: a file or a folder; hidden files are left out.

    Raises:
        ValueError: if there is none, or all are empty.
    """
    if not path.exists():
        raise ValueError(f"data.path={path} does not exist: give a text file, an .npy file or raw tokens")
    if path.is_file():
        files = [path]
    else:
        found = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
        files = [path / file for file in sorted(found, key=lambda file: file.as_posix()) if not _hidden(file)]
        if not files:
            raise ValueError(f"data.path={path} is a folder without files: there is nothing to train on")
    if not any(file.stat().st_size for file in files):
        raise ValueError(f"data.path={path} is empty: there is nothing to train on")
    return files


def holds_json_lines(path: Path, text_key: str) -> bool:
    """Tell whether a file, or the first one of a folder, holds documents as JSON lines.

    Its name says so (``.jsonl``, ``.ndjson``), or says nothing, as WikiExtractor's, and the first line is a document.

    Args:
        path: a file or a folder.
        text_key: where a JSON line has its text.
    """
    try:
        first = next(file for file in list_files(path) if file.stat().st_size)
        ending = (first.with_suffix("") if first.suffix in _OPENERS else first).suffix
        if ending not in ("", ".json"):
            return ending in (".jsonl", ".ndjson")
        with _OPENERS.get(first.suffix, open)(first, "rb") as opened:
            values = json.loads(opened.readline(_LINE_BYTES))
    except (ValueError, OSError, EOFError, lzma.LZMAError):  # what can't be read is told by who reads it
        return False
    return isinstance(values, dict) and isinstance(values.get(text_key), str)


def _hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def read_pieces(
    files: Sequence[Path], *, json_lines: bool, text_key: str = "text", start: Position | None = None
) -> Iterator[Piece]:
    """Read documents: a line of JSON each, or a file each.

    Args:
        files: read one after the other; ``.gz``, ``.bz2`` and ``.xz`` are decompressed.
        json_lines: whether a line is a document, as WikiExtractor's ``--json`` writes, or a file.
        text_key: where a JSON line has its text.
        start: where to begin, as an earlier :attr:`Piece.after`.

    Yields:
        Pieces in order. Documents without any text are left out.

    Raises:
        ValueError: naming file and place, if a line is no JSON object or has no text there.
    """
    start = start or Position()
    for index in range(start.file, len(files)):
        offset = start.offset if index == start.file else 0
        try:
            with _OPENERS.get(files[index].suffix, open)(files[index], "rb") as opened:
                opened.seek(offset)
                if json_lines:
                    yield from _json_pieces(opened, files[index], index, offset, text_key)
                else:
                    yield from _text_pieces(opened, index, offset)
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise ValueError(f"{files[index]} can't be read: {error}") from error


def _json_pieces(opened: IO[bytes], file: Path, index: int, offset: int, text_key: str) -> Iterator[Piece]:
    for line in opened:
        begin, offset = offset, offset + len(line)
        if not line.strip():
            continue
        text = _text_of(line, f"{file}, the line at byte {begin},", text_key)
        if text.strip():
            # JSON can hold halves of characters, which UTF-8 can't.
            yield Piece(text=text.encode(errors="replace"), ends_document=True, after=Position(index, offset))


def _text_of(line: bytes, where: str, text_key: str) -> str:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): for plain text set data.format=text") from error
    if not isinstance(values, dict) or not isinstance(values.get(text_key), str):
        has = ", ".join(values) if isinstance(values, dict) else type(values).__name__
        raise ValueError(f"{where} has no text under {text_key!r} (it has: {has}): set data.text_key")
    text: str = values[text_key]
    return text


def _text_pieces(opened: IO[bytes], index: int, offset: int) -> Iterator[Piece]:
    block = _read_block(opened, b"")
    while block:
        text = _whole_characters(block) if block[-1:] != b"\n" else block
        rest = block[len(text) :]
        following = _read_block(opened, rest)
        if following == rest:  # the file ends here
            text, following = block, b""
        offset += len(text)
        after = Position(index, offset) if following else Position(index + 1)
        yield Piece(text=text, ends_document=not following, after=after)
        block = following


def _read_block(opened: IO[bytes], rest: bytes) -> bytes:
    """Read about 1 MiB, up to the end of a line."""
    block = rest + opened.read(_BLOCK_BYTES - len(rest))
    if block and block[-1:] != b"\n":
        block += opened.readline(_LINE_BYTES)
    return block


def _whole_characters(block: bytes) -> bytes:
    """Leave out an incomplete UTF-8 character at the end."""
    for length in range(1, min(4, len(block)) + 1):
        byte = block[-length]
        if byte >= 0xC0:
            complete = length == (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
            return block if complete else block[:-length]
        if byte < 0x80:
            break
    return block
