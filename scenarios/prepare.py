"""Turn text into a memory map of tokens, once.

    python -m scenarios.prepare extracted/ prepared/wiki --format jsonl --tokenizer tokenizer.json
    python -m scenarios.train data=memmap data.path=prepared/wiki model.vocab_size=50257

When it is interrupted, by whatever, the same command goes on where it was, and the files are the same bytes as if it
had never been: it writes down from time to time how far they are on the disk, and cuts off what came after that.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from tqdm import tqdm

from scenarios.data.loading import encode, fitting_tokenizer, in_groups, kind_of
from scenarios.data.memmap import DOCUMENTS, HEADER_BYTES, PREPARED, PROGRESS, TOKENS, npy_header
from scenarios.data.settings import DataSettings
from scenarios.data.stream import smallest_dtype
from scenarios.data.text import Position, list_files, read_pieces
from scenarios.data.tokenizer import BYTES, Tokenizer

SAVE_EVERY_BYTES = 16 << 20
_LOCK = ".lock"


@dataclass
class _Progress:
    """How far the files on the disk are; what they hold beyond that does not count.

    Attributes:
        file: index of the file of text in which the next piece begins.
        offset: where in it.
        num_tokens: entries of ``tokens.npy``.
        num_documents: entries of ``documents.npy``.
    """

    file: int = 0
    offset: int = 0
    num_tokens: int = 0
    num_documents: int = 0


def prepare(
    settings: DataSettings, folder: Path, *, restart: bool = False, save_every_bytes: int = SAVE_EVERY_BYTES,
    show: bool = False,
) -> dict[str, Any]:
    """Tokenize text into a folder; one that is complete is left as it is.

    Args:
        settings: the text and the tokenizer.
        folder: where to; what an interrupted call has left there is continued.
        restart: discard what is there instead.
        save_every_bytes: text between two moments from which it can be continued.
        show: whether to show a progress bar.

    Returns:
        What ``prepared.json`` says: ``num_tokens``, ``num_documents``, ``vocab_size``, ``dtype``, and the job.

    Raises:
        ValueError: if text or tokenizer can't be used, or the folder holds something else; with the remedy.
    """
    files, tokenizer = _open_source(settings)
    job = _describe(settings, files, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if restart:
            _discard(folder)
        done, progress = _find(folder, job)
        if done is not None:
            (folder / PROGRESS).unlink(missing_ok=True)
            return done
        _replace(folder / PROGRESS, {"job": job, "progress": asdict(progress)})
        _work(settings, job, files, tokenizer, folder, progress, save_every_bytes, show)
        result = {
            "num_tokens": progress.num_tokens, "num_documents": progress.num_documents,
            "vocab_size": tokenizer.vocab_size, "dtype": smallest_dtype(tokenizer.vocab_size), "job": job,
        }  # fmt: skip
        _replace(folder / PREPARED, result)
        (folder / PROGRESS).unlink(missing_ok=True)
    return result


def _open_source(settings: DataSettings) -> tuple[list[Path], Tokenizer]:
    """Find text and tokenizer; all problems at once."""
    kind, problems = kind_of(settings), []
    if kind not in ("text", "jsonl"):
        problems.append(f"data.path={settings.path} is {kind}, not text or jsonl: it needs no preparation")
    files, tokenizer = [], None
    try:
        files = list_files(Path(str(settings.path)).expanduser())
    except ValueError as error:
        problems.append(str(error))
    try:
        tokenizer = fitting_tokenizer(settings)
    except ValueError as error:
        problems.append(str(error))
    if problems or tokenizer is None:
        raise ValueError("; ".join(problems))
    return files, tokenizer


def _describe(settings: DataSettings, files: Sequence[Path], tokenizer: Tokenizer) -> dict[str, Any]:
    """Say what is made of what, as values that JSON can hold; the same ones are needed to go on."""
    return {
        "format": kind_of(settings),
        "text_key": settings.text_key,
        "tokenizer": tokenizer.fingerprint,
        "end_of_document": tokenizer.end_of_document,
        "files": [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files],
    }


def _find(folder: Path, job: dict[str, Any]) -> tuple[dict[str, Any] | None, _Progress]:
    """What the folder holds of this job: all of it, or how far it is."""
    done, begun = _read_json(folder / PREPARED), _read_json(folder / PROGRESS)
    found = done or begun
    if done is None and begun is not None and not begun["progress"]["num_tokens"]:
        return None, _Progress()  # such as by a call with a mistake in it: nothing would be lost
    if found is None:
        others = sorted(file.name for file in folder.iterdir() if file.name != _LOCK)
        if others:
            raise ValueError(f"{folder} holds other files ({', '.join(others[:5])}): give an empty or a new folder")
        return None, _Progress()
    changed = [name for name, value in job.items() if found.get("job", {}).get(name) != value]
    if changed:
        raise ValueError(
            f"{folder} holds tokens that were made with another {', '.join(changed)}: give the values of then, another "
            "folder, or --restart, which discards them"
        )
    return done, _Progress(**begun["progress"]) if begun is not None else _Progress()


def _work(
    settings: DataSettings, job: dict[str, Any], files: Sequence[Path], tokenizer: Tokenizer, folder: Path,
    progress: _Progress, save_every_bytes: int, show: bool,
) -> None:
    """Write tokens and ends of documents from where it is."""
    dtype, before = np.dtype(smallest_dtype(tokenizer.vocab_size)), _Sizes(files)
    start = Position(progress.file, progress.offset)
    pieces = read_pieces(files, json_lines=job["format"] == "jsonl", text_key=settings.text_key, start=start)
    since_saved = 0
    with (
        _opened(folder / TOKENS, dtype, progress.num_tokens) as tokens,
        _opened(folder / DOCUMENTS, np.dtype(np.int64), progress.num_documents) as documents,
        tqdm(
            total=before.total, initial=before(start), unit="B", unit_scale=True, disable=not show, desc="tokenizing"
        ) as bar,
    ):
        for group in in_groups(pieces):
            for piece, ids in zip(group, encode(group, tokenizer, files), strict=True):
                tokens.write(ids.astype(dtype).tobytes())
                progress.num_tokens += len(ids)
                if piece.ends_document:
                    documents.write(np.int64(progress.num_tokens).tobytes())
                    progress.num_documents += 1
            progress.file, progress.offset = group[-1].after.file, group[-1].after.offset
            bar.update(before(group[-1].after) - bar.n)
            bar.set_postfix_str(f"{progress.num_tokens:,} tokens", refresh=False)
            since_saved += sum(len(piece.text) for piece in group)
            if since_saved >= save_every_bytes:
                _to_disk(tokens, documents)
                _replace(folder / PROGRESS, {"job": job, "progress": asdict(progress)})
                since_saved = 0
        if not progress.num_tokens:
            raise ValueError(f"data.path={settings.path} holds no text: there is nothing to prepare")
        bar.update(before.total - bar.n)
        for opened, kind, length in (
            (tokens, dtype, progress.num_tokens), (documents, np.dtype(np.int64), progress.num_documents)
        ):  # fmt: skip
            opened.seek(0)
            opened.write(npy_header(kind, length))
        _to_disk(tokens, documents)


class _Sizes:
    """Bytes of files up to a position; a compressed file counts when it is done.

    Args:
        files: in order.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        sizes = [file.stat().st_size for file in files]
        self._before = [0, *np.cumsum(sizes).tolist()]
        self._compressed = [file.suffix in (".gz", ".bz2", ".xz") for file in files]
        self.total: int = self._before[-1]

    def __call__(self, position: Position) -> int:
        """Return the bytes before a position."""
        before: int = self._before[position.file]
        inside = position.file < len(self._compressed) and not self._compressed[position.file]
        return before + position.offset if inside else before


@contextmanager
def _opened(path: Path, dtype: np.dtype[Any], length: int) -> Iterator[IO[bytes]]:
    """Open an ``.npy`` file to append to its first entries; what came after them is cut off."""
    wanted = HEADER_BYTES + length * dtype.itemsize if length else 0
    if length and (not path.exists() or path.stat().st_size < wanted):
        raise ValueError(f"{path} is shorter than {PROGRESS} beside it says: begin again with --restart")
    with open(path, "r+b" if path.exists() else "w+b") as opened:
        opened.truncate(wanted)
        if not length:
            opened.write(npy_header(dtype, 0))
        opened.seek(0, os.SEEK_END)
        yield opened


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep others from writing to the folder at the same time."""
    with open(folder / _LOCK, "w", encoding="utf-8") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(f"{folder} is being written by another process: wait for it, or end it") from error
        yield
    (folder / _LOCK).unlink(missing_ok=True)


def _discard(folder: Path) -> None:
    for name in (PREPARED, PROGRESS, TOKENS, DOCUMENTS):  # first what says that the others count
        (folder / name).unlink(missing_ok=True)


def _read_json(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}): begin again with --restart") from error
    return content


def _to_disk(*files: IO[bytes]) -> None:
    for file in files:
        file.flush()
        os.fsync(file.fileno())


def _replace(file: Path, content: dict[str, Any]) -> None:
    """Write a file so that it has either its old content or its new one, whatever happens."""
    partial = file.with_name(f".{file.name}.partial")
    with open(partial, "wb") as opened:
        opened.write(json.dumps(content, indent=1).encode() + b"\n")
        _to_disk(opened)
    os.replace(partial, file)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number greater than 0, such as 16")
    return value


def _as_options(message: str) -> str:
    """Name settings as this command line does: ``data.text_key=body`` is ``--text-key body`` here."""
    message = message.replace("data.path=", "")
    return re.sub(r"\bdata\.(\w+)(=?)", lambda name: f"--{name[1].replace('_', '-')}{' ' if name[2] else ''}", message)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m scenarios.prepare",
        description="Turn text into a memory map of tokens. Interrupted, the same command continues.",
        epilog="examples: python -m scenarios.prepare books/ prepared/books\n"
        "          python -m scenarios.prepare extracted/ prepared/wiki --format jsonl --tokenizer tokenizer.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help="a text file, a folder of them, or JSON lines; .gz, .bz2 and .xz too")
    parser.add_argument("folder", type=Path, help="where to; then: data=memmap data.path=FOLDER")
    parser.add_argument("--format", choices=("text", "jsonl"), help="default: by the name and the first line")
    parser.add_argument("--text-key", default="text", help="where a JSON line has its text (default: text)")
    parser.add_argument(
        "--tokenizer", default=BYTES,
        help="bytes (default), a JSON file of the tokenizers library, or the folder of a Hugging Face tokenizer",
    )  # fmt: skip
    parser.add_argument(
        "--end-of-document", help="token put after every document (default: the tokenizer's own; '' for none)"
    )
    parser.add_argument("--restart", action="store_true", help="discard what the folder holds")
    parser.add_argument(
        "--save-every-mb", type=_positive, default=SAVE_EVERY_BYTES / 2**20,
        help="MiB of text between two moments from which it can be continued (default: %(default)s)",
    )  # fmt: skip
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line and prepare; a user's mistake ends in one line, with exit code 1."""
    given = _parser().parse_args(arguments)
    try:
        settings = DataSettings(
            path=given.source, format=given.format, text_key=given.text_key, tokenizer=given.tokenizer,
            end_of_document=given.end_of_document,
        )  # fmt: skip
        made = prepare(
            settings, given.folder, restart=given.restart, save_every_bytes=int(given.save_every_mb * 2**20), show=True
        )
    except ValueError as error:
        sys.exit(f"error: {_as_options(str(error))}")
    except KeyboardInterrupt:
        print("\ninterrupted: the same command continues", file=sys.stderr)
        sys.exit(130)
    print(
        f"{made['num_tokens']:,} tokens of {made['num_documents']:,} documents in {given.folder}; train with\n"
        f"  python -m scenarios.train data=memmap data.path={given.folder} model.vocab_size={made['vocab_size']}"
    )


if __name__ == "__main__":
    main()
