"""Text to token ids: bytes as they are, a ``tokenizers`` JSON file, or a local Hugging Face tokenizer."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
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


class _NamedTokens(ABC):
    """What tokenizers of both libraries have in common: tokens with names, and text that must be UTF-8.

    Args:
        path: where it is from, for messages.
        ids: of all tokens, by name.
        usual_end: token that ends a document where nothing else is asked for; ``""`` for none.
        end_of_document: token that is asked for; ``""`` for none, ``None`` for the usual one.
        fingerprint: see :class:`Tokenizer`.

    Raises:
        ValueError: if it has no such token.
    """

    def __init__(
        self, path: Path, ids: dict[str, int], usual_end: str, end_of_document: str | None, fingerprint: str
    ) -> None:
        token = usual_end if end_of_document is None else end_of_document
        if token and token not in ids:
            raise ValueError(
                f"data.end_of_document={token!r} is no token of {path}: give one of its tokens, or an empty text for "
                "none"
            )
        self.vocab_size = max(ids.values()) + 1
        self.end_of_document = ids[token] if token else None
        self.fingerprint = fingerprint

    def encode(self, texts: Sequence[bytes]) -> list[NDArray[np.int64]]:
        """As in :class:`Tokenizer`."""
        return [np.array(ids, dtype=np.int64) for ids in self._ids([text.decode() for text in texts])]

    @abstractmethod
    def _ids(self, texts: list[str]) -> Iterable[Sequence[int]]:
        """Token ids of each text."""


class FileTokenizer(_NamedTokens):
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
        usual = next((token for token in _END_TOKENS if token in ids), "")
        super().__init__(path, ids, usual, end_of_document, hashlib.sha256(content).hexdigest())

    def _ids(self, texts: list[str]) -> Iterable[Sequence[int]]:
        return (encoding.ids for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=False))


class HuggingFaceTokenizer(_NamedTokens):
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
        end = self._tokenizer.eos_token or ""
        super().__init__(path, self._tokenizer.get_vocab(), end, end_of_document, _fingerprint(path))

    def _ids(self, texts: list[str]) -> Iterable[Sequence[int]]:
        found = self._tokenizer(texts, add_special_tokens=False, verbose=False, return_attention_mask=False)
        ids: list[list[int]] = found["input_ids"]
        return ids


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


def _fingerprint(folder: Path) -> str:
    """Hash names and contents of what a tokenizer may be made of: all but weights."""
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".model", ".txt", ".tiktoken", ".jinja"):
            digest.update(json.dumps(file.name).encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
