"""Files as other programs write them, written independently of the readers."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path

WORDS = "the of and to in is that for it as was with be by on not he his but at".split()


def article(number: int) -> str:
    """A short text with characters of one to four bytes, another one for each number."""
    body = " ".join(WORDS[(number * 7 + i * (3 + number % 5)) % len(WORDS)] for i in range(20 + number % 30))
    return f"Article {number}\n\n{body} naïve — 𝔘nicode {number}."


def write_wiki(folder: Path, articles: int, *, files: int = 3) -> list[str]:
    """Write JSON lines in the layout of WikiExtractor, with an article that has no text; return the texts."""
    texts = [article(number) for number in range(articles)]
    for index in range(files):
        file = folder / ("A" + "AB"[index // 2]) / f"wiki_{index % 2:02d}"
        file.parent.mkdir(parents=True, exist_ok=True)
        mine = texts[index * articles // files : (index + 1) * articles // files]
        lines = [{"id": str(i), "revid": "1", "url": "u", "title": "t", "text": text} for i, text in enumerate(mine)]
        lines.insert(1, {"id": "x", "revid": "1", "url": "u", "title": "redirect", "text": ""})
        file.write_text("".join(json.dumps(line, ensure_ascii=index % 2 == 0) + "\n" for line in lines), "utf-8")
    return texts


def write_tokenizer(file: Path, *, vocab_size: int = 300) -> None:
    """Train a byte-level BPE on the articles and write its JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>", "<pad>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([article(number) for number in range(20)], trainer)
    tokenizer.enable_truncation(8)  # as many published files have it; it must not cut documents
    tokenizer.save(str(file))


def write_megatron(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], *, code: int = 8, letter: str = "H",
    gap: bytes = b"", version: int = 1, magic: bytes = b"MMIDIDX\x00\x00",
) -> None:
    """Write documents, each of sequences, as Megatron's builder does: values packed one by one.

    Args:
        prefix: of both files.
        documents: token ids.
        code: Megatron's number of the type.
        letter: the type's in ``struct``.
        gap: bytes that are put between sequences, which the index skips.
        version: of the index.
        magic: its first bytes.
    """
    data, sizes, pointers, starts = b"", [], [], [0]
    for sequences in documents:
        for sequence in sequences:
            pointers.append(len(data))
            sizes.append(len(sequence))
            data += b"".join(struct.pack("<" + letter, token) for token in sequence) + gap
        starts.append(len(sizes))
    index = magic + struct.pack("<Q", version) + struct.pack("<B", code)
    index += struct.pack("<Q", len(sizes)) + struct.pack("<Q", len(starts))
    index += b"".join(struct.pack("<i", size) for size in sizes)
    index += b"".join(struct.pack("<q", pointer) for pointer in pointers)
    index += b"".join(struct.pack("<q", start) for start in starts)
    Path(f"{prefix}.bin").write_bytes(data)
    Path(f"{prefix}.idx").write_bytes(index)
