"""Text to token ids: bytes as they are, a ``tokenizers`` JSON file, or a local Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

BYTES = "bytes"
# Looked for, in this order, where a tokenizer file does not say which token ends a document.
_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What turns text into token ids.

    Attributes:
        vocab_size: one more than the largest id.
        end_of_document: id put after every document; ``None`` for none.
        fingerprint: differs between tokenizers that give different ids.
    """

    vocab_size: int
    end_of_document: int | None
    fingerprint: str

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        """Tokenize some texts, each on its own.

        Args:
            texts: UTF-8.

        Returns:
            Ids of each; no special tokens are added.

        Raises:
            UnicodeDecodeError: if one is not UTF-8, unless the tokenizer takes any bytes.
        """
        ...


class ByteTokenizer:
    """Every byte is a token; 0, which text does not hold, ends a document.

    Args:
        end_of_document: ``None`` or ``""``; bytes have no tokens with names.
    """

    vocab_size = 256
    fingerprint = BYTES

    def __init__(self, end_of_document: str | None = None) -> None:
        if end_of_document:
            raise ValueError(
                f"data.end_of_document={end_of_document!r}: bytes have no such token; give null for byte 0, or an "
                "empty text for none"
            )
        self.end_of_document = 0 if end_of_document is None else None

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        """As in :class:`Tokenizer`; any bytes will do."""
        return [np.frombuffer(text, dtype=np.uint8).astype(np.int64) for text in texts]


class FileTokenizer:
    """A tokenizer of the ``tokenizers`` library, from its JSON file.

    Args:
        path: the file.
        end_of_document: a token of it; ``None`` for the first of a few usual ones that it has, if any; ``""`` for
            none.

    Raises:
        ValueError: if the library is missing, the file can't be read, or it has no such token.
    """

    def __init__(self, path: Path, end_of_document: str | None = None) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise ValueError(
                f"data.tokenizer={path} needs the tokenizers library: pip install 'dynpipe_ds[data]'"
            ) from error
        content = path.read_bytes()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(f"data.tokenizer={path} is no file of the tokenizers library: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        usual = next((token for token in _END_TOKENS if token in ids), "")
        self.end_of_document = _end_id(ids, usual if end_of_document is None else end_of_document, path)
        self.fingerprint = hashlib.sha256(content).hexdigest()

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        """As in :class:`Tokenizer`."""
        decoded = [text.decode() for text in texts]
        encodings = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]


class HuggingFaceTokenizer:
    """A tokenizer of ``transformers``, from the folder that its ``save_pretrained`` wrote; nothing is downloaded.

    Args:
        path: the folder.
        end_of_document: a token of it; ``None`` for its ``eos_token``, if any; ``""`` for none.

    Raises:
        ValueError: if the library is missing, the folder can't be read, or it has no such token.
    """

    def __init__(self, path: Path, end_of_document: str | None = None) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ValueError(
                f"data.tokenizer={path} is a folder, which needs transformers: pip install 'dynpipe_ds[hf]', or give "
                "the tokenizer.json in it"
            ) from error
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # anything, from missing files to code that would have to be trusted
            raise ValueError(f"data.tokenizer={path} is no tokenizer folder of transformers: {error}") from error
        ids = self._tokenizer.get_vocab()
        self.vocab_size = max(ids.values()) + 1
        own = self._tokenizer.eos_token or ""
        self.end_of_document = _end_id(ids, own if end_of_document is None else end_of_document, path)
        self.fingerprint = _fingerprint(path)

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        """As in :class:`Tokenizer`."""
        decoded = [text.decode() for text in texts]
        found = self._tokenizer(decoded, add_special_tokens=False, verbose=False, return_attention_mask=False)
        return [np.array(ids, dtype=np.int64) for ids in found["input_ids"]]


def load_tokenizer(name: str, end_of_document: str | None = None) -> Tokenizer:
    """Find a tokenizer.

    Args:
        name: ``"bytes"``, a JSON file of the ``tokenizers`` library, or a folder of ``transformers``.
        end_of_document: see the classes.

    Raises:
        ValueError: if there is none, or it can't be used; with the remedy.
    """
    if name == BYTES:
        return ByteTokenizer(end_of_document)
    path = Path(name).expanduser()
    if path.is_dir():
        return HuggingFaceTokenizer(path, end_of_document)
    if path.is_file():
        return FileTokenizer(path, end_of_document)
    raise ValueError(
        f"data.tokenizer={name} does not exist: give {BYTES}, a JSON file of the tokenizers library, or the folder of "
        "a Hugging Face tokenizer"
    )


def _end_id(ids: dict[str, int], token: str, path: Path) -> int | None:
    if not token:
        return None
    if token not in ids:
        raise ValueError(
            f"data.end_of_document={token!r} is no token of {path}: give one of its tokens, or an empty text for none"
        )
    return ids[token]


def _fingerprint(folder: Path) -> str:
    """Hash names and contents of what a tokenizer may be made of: all but weights."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".model", ".txt", ".tiktoken", ".jinja"):
            digest.update(json.dumps(file.name).encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
