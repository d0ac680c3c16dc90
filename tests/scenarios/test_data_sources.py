"""Reading what people have: folders, JSON lines, tokenizers, Megatron's files."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scenarios.data import DataSettings, load_corpus, load_tokens, text
from scenarios.data.loading import TEXT_IN_MEMORY_BYTES, encode, in_groups
from scenarios.data.text import Piece, Position, list_files, read_pieces
from scenarios.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.scenarios.data_files import article, write_megatron, write_tokenizer, write_wiki


def documents(settings: DataSettings, vocab_size: int = 256) -> list[list[int]]:
    """Token ids of every document."""
    corpus = load_corpus(settings, vocab_size)
    assert corpus.documents is not None and corpus.documents[-1] == len(corpus.tokens)
    starts = [0, *corpus.documents[:-1].tolist()]
    return [corpus.tokens[a:b].tolist() for a, b in zip(starts, corpus.documents.tolist(), strict=True)]


# -- text -------------------------------------------------------------------------------------


def test_json_lines_as_wikiextractor_writes_them(tmp_path: Path) -> None:
    """Articles in the order of files, without those that have no text; byte 0 after each."""
    texts = write_wiki(tmp_path, 10)
    found = documents(DataSettings(path=str(tmp_path), format="jsonl"))
    assert found == [[*text.encode(), 0] for text in texts]
    assert len(found) == 10
    without = documents(DataSettings(path=str(tmp_path), format="jsonl", end_of_document=""))
    assert without == [list(text.encode()) for text in texts]


def test_a_folder_of_texts(tmp_path: Path) -> None:
    """A file is a document; sub-folders too, hidden files not, compressed ones are read; sorted by name."""
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.txt").write_text("second", encoding="utf-8")
    (tmp_path / "a.txt").write_bytes(b"\xff first")  # bytes are tokens, whatever the encoding
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"third"))
    (tmp_path / "d.txt.bz2").write_bytes(bz2.compress(b"fourth"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / ".hidden").write_text("no")
    found = documents(DataSettings(path=str(tmp_path)))
    assert [bytes(ids) for ids in found] == [b"\xff first\0", b"second\0", b"third\0", b"fourth\0"]


def test_what_the_path_is_decides(tmp_path: Path) -> None:
    """Unless told: .jsonl is JSON lines, also compressed, so are WikiExtractor's names; .idx is Megatron's."""
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n\n{"text": "y"}'))
    assert documents(DataSettings(path=str(tmp_path / "a.jsonl.gz"))) == [[ord("x"), 0], [ord("y"), 0]]
    texts = write_wiki(tmp_path / "wiki", 3)  # WikiExtractor's files have names without an ending
    assert documents(DataSettings(path=str(tmp_path / "wiki"))) == [[*text.encode(), 0] for text in texts]
    assert documents(DataSettings(path=str(tmp_path / "wiki"), format="text"))[0][0] == ord("{")
    for name, content in (("a.txt", '{"text": "x"}'), ("b", '{"title": "x"}')):  # called text; has no text
        (tmp_path / name).write_text(content, encoding="utf-8")
        assert bytes(load_tokens(tmp_path / name)) == content.encode()
    write_megatron(tmp_path / "m", [[[1, 2]], [[3]]])
    for name in ("m.idx", "m.bin"):
        assert documents(DataSettings(path=str(tmp_path / name))) == [[1, 2], [3]]


def test_pieces_are_the_same_from_any_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long file is cut at lines, a long line between characters; who goes on at a piece's end reads the same."""
    monkeypatch.setattr(text, "_BLOCK_BYTES", 40)
    monkeypatch.setattr(text, "_LINE_BYTES", 25)
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for number, file in enumerate(files):
        body = ("𝔘ñ€a" * 40 + "\n") + "".join(article(number + i) + "\n" * (i % 2) for i in range(5))
        file.write_text(body, encoding="utf-8")
    pieces = list(read_pieces(files, json_lines=False))
    assert b"".join(piece.text for piece in pieces) == b"".join(file.read_bytes() for file in files)
    assert sum(piece.ends_document for piece in pieces) == 2 and len(pieces) > 20
    assert max(len(piece.text) for piece in pieces) <= 40 + 25 + 3
    for piece in pieces:
        piece.text.decode()  # no character is cut
    for done, piece in enumerate(pieces):
        assert list(read_pieces(files, json_lines=False, start=piece.after)) == pieces[done + 1 :]


def test_compressed_json_lines_from_any_place(tmp_path: Path) -> None:
    """Places count in what the file holds."""
    write_wiki(tmp_path / "plain", 8, files=2)
    files = list_files(tmp_path / "plain")
    for file in files:
        (tmp_path / (file.name + ".bz2")).write_bytes(bz2.compress(file.read_bytes()))
    packed = sorted(tmp_path.glob("*.bz2"))
    pieces = list(read_pieces(packed, json_lines=True))
    assert pieces == list(read_pieces(files, json_lines=True)) and len(pieces) == 8
    for done, piece in enumerate(pieces):
        assert list(read_pieces(packed, json_lines=True, start=piece.after)) == pieces[done + 1 :]


def test_json_lines_that_cannot_be_used(tmp_path: Path) -> None:
    """File, place and remedy."""
    file = tmp_path / "a.jsonl"
    settings = DataSettings(path=str(file))
    file.write_text('{"text": "x"}\n<doc id="1">\n')
    with pytest.raises(ValueError, match="a.jsonl, the line at byte 14, is not JSON .*set data.format=text"):
        load_corpus(settings, 256)
    file.write_text('{"body": "x", "id": 3}\n')
    with pytest.raises(ValueError, match=r"has no text under 'text' \(it has: body, id\): set data.text_key"):
        load_corpus(settings, 256)
    assert documents(DataSettings(path=str(file), text_key="body")) == [[ord("x"), 0]]
    file.write_text('["x"]\n')
    with pytest.raises(ValueError, match=r"has no text under 'text' \(it has: list\)"):
        load_corpus(settings, 256)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}' * 500)[:-20])
    with pytest.raises(ValueError, match="a.jsonl.gz can't be read"):
        load_corpus(DataSettings(path=str(tmp_path / "a.jsonl.gz")), 256)


def test_long_text_must_be_prepared(tmp_path: Path) -> None:
    """The message has the command; a part of it may be used, and one text of bytes of any length."""
    file = tmp_path / "long.jsonl"
    with open(file, "wb") as opened:
        opened.write(b'{"text": "x"}\n')
        opened.truncate(TEXT_IN_MEMORY_BYTES + 1)
    with pytest.raises(ValueError, match=r"scenarios.prepare .*long.jsonl prepared --format jsonl' once.*data.max_tok"):
        load_corpus(DataSettings(path=str(file)), 256)
    assert len(load_tokens(file.rename(tmp_path / "long.txt"))) == TEXT_IN_MEMORY_BYTES + 1


# -- tokenizers -------------------------------------------------------------------------------


def test_a_tokenizers_file(tmp_path: Path) -> None:
    """Ids decode to the text; documents are tokenized whole, each ends with the tokenizer's own token."""
    tokenizers = pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path / "tokenizer.json")
    texts = write_wiki(tmp_path / "wiki", 6)
    own = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    settings = {"path": str(tmp_path / "wiki"), "format": "jsonl", "tokenizer": str(tmp_path / "tokenizer.json")}
    found = documents(DataSettings(**settings), 300)
    assert [own.decode(ids[:-1]) for ids in found] == texts
    assert {ids[-1] for ids in found} == {own.token_to_id("<|endoftext|>")}
    padded = documents(DataSettings(**settings, end_of_document="<pad>"), 300)
    assert {ids[-1] for ids in padded} == {own.token_to_id("<pad>")}
    assert load_corpus(DataSettings(**settings), 300).tokens.dtype == np.uint16
    first = load_corpus(DataSettings(**settings, max_tokens=50), 300)
    assert first.tokens.tolist() == sum(found, [])[:50] and first.documents is not None
    assert first.documents[-1] == 50


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    """As save_pretrained writes it, with its own token for the end; nothing is downloaded."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    write_tokenizer(tmp_path / "tokenizer.json")
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="<pad>", model_max_length=8
    )
    wrapped.save_pretrained(tmp_path / "folder")
    found, plain = (load_tokenizer(str(tmp_path / name)) for name in ("folder", "tokenizer.json"))
    texts = [article(number).encode() for number in range(3)]
    for left, right in zip(found.encode(texts), plain.encode(texts), strict=True):
        assert left.tolist() == right.tolist() and len(left) > 8
    assert found.vocab_size == 300 and found.end_of_document != plain.end_of_document
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="other is no tokenizer folder of transformers"):
        load_tokenizer(str(tmp_path / "other"))


def test_tokenizers_that_cannot_be_used(tmp_path: Path) -> None:
    """Value, rule, remedy; what is wrong with the text is said at the same time."""
    pytest.importorskip("tokenizers")
    file = tmp_path / "tokenizer.json"
    write_tokenizer(file)
    wrong: dict[str, Any] = {"path": str(tmp_path / "nowhere"), "tokenizer": str(file)}
    with pytest.raises(ValueError, match="has 300 token ids, but model.vocab_size=256: set model.vocab_size=300; .*"
                       "nowhere does not exist: give a text file"):  # fmt: skip
        load_corpus(DataSettings(**wrong), 256)
    with pytest.raises(ValueError, match="'<end>' is no token of .*tokenizer.json: give one"):
        load_tokenizer(str(file), "<end>")
    with pytest.raises(ValueError, match="data.end_of_document='<end>': bytes have no such token"):
        load_tokenizer("bytes", "<end>")
    with pytest.raises(ValueError, match="gpt2 does not exist: give bytes, a JSON file"):
        load_tokenizer("gpt2")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt is not UTF-8 \(.*convert it, or set data.tokenizer=bytes"):
        load_corpus(DataSettings(path=str(tmp_path / "latin.txt"), tokenizer=str(file)), 300)
    file.write_text(json.dumps({"model": 3}))
    with pytest.raises(ValueError, match="tokenizer.json is no file of the tokenizers library"):
        load_tokenizer(str(file))


def test_the_file_that_is_not_utf8_is_named() -> None:
    """Also when the piece is the last of its file."""

    class Strict(ByteTokenizer):
        def encode(self, texts: Any) -> Any:
            return [np.frombuffer(text.decode().encode(), np.uint8) for text in texts]

    pieces = [
        Piece(text=b"good", ends_document=True, after=Position(1)),
        Piece(text=b"\xff", ends_document=True, after=Position(2)),
    ]
    for group in in_groups(iter(pieces)):
        with pytest.raises(ValueError, match="b.txt is not UTF-8"):
            encode(group, Strict(), [Path("a.txt"), Path("b.txt")])


# -- Megatron ---------------------------------------------------------------------------------

DOCUMENTS = [[[5, 6, 7], [8]], [[250]], [[9, 10], [], [11, 12]]]


@pytest.mark.parametrize(("code", "letter"), [(1, "B"), (3, "h"), (4, "i"), (5, "q"), (8, "H")])
def test_megatron_files(tmp_path: Path, code: int, letter: str) -> None:
    """All integer types; the tokens are mapped, not copied."""
    write_megatron(tmp_path / "my_text_document", DOCUMENTS, code=code, letter=letter)
    settings = DataSettings(path=str(tmp_path / "my_text_document"), format="megatron")
    assert documents(settings) == [[5, 6, 7, 8], [250], [9, 10, 11, 12]]
    tokens = load_corpus(settings, 256).tokens
    assert isinstance(tokens, np.memmap) and tokens.dtype == np.dtype("<" + letter)


def test_megatron_files_with_gaps(tmp_path: Path) -> None:
    """The index decides where sequences are."""
    write_megatron(tmp_path / "m", DOCUMENTS, gap=b"\xff\xff")
    settings = DataSettings(path=str(tmp_path / "m.idx"))
    assert documents(settings) == [[5, 6, 7, 8], [250], [9, 10, 11, 12]]
    tokens = load_corpus(settings, 256).tokens
    every = [5, 6, 7, 8, 250, 9, 10, 11, 12]
    for start in range(10):
        for stop in range(start, 11):
            assert tokens[start:stop].tolist() == every[start:stop]
    some = load_corpus(DataSettings(path=str(tmp_path / "m.idx"), max_tokens=6), 256)
    assert some.tokens[0:99].tolist() == every[:6] and some.documents is not None
    assert some.documents.tolist() == [4, 5, 6]


def test_megatron_files_that_cannot_be_used(tmp_path: Path) -> None:
    prefix = tmp_path / "m"
    settings = DataSettings(path=str(prefix), format="megatron")
    with pytest.raises(ValueError, match=r"m.bin does not exist: data.path=.* must name both"):
        load_corpus(settings, 256)
    write_megatron(prefix, DOCUMENTS)
    with pytest.raises(ValueError, match="token id 250, but the model knows ids 0 to 63"):
        load_corpus(settings, 64)
    data = prefix.with_suffix(".bin").read_bytes()
    prefix.with_suffix(".bin").write_bytes(data[:-2])
    with pytest.raises(ValueError, match="has 16 bytes, but .* places tokens of 2 bytes up to byte 18"):
        load_corpus(settings, 256)
    index = prefix.with_suffix(".idx").read_bytes()
    prefix.with_suffix(".idx").write_bytes(index[:-8])
    with pytest.raises(ValueError, match=f"has {len(index) - 8} bytes, but its header says {len(index)}"):
        load_corpus(settings, 256)
    for wrong, message in (
        ({"magic": b"TNTIDX\x00\x00\x00"}, "does not begin like a Megatron index"),
        ({"version": 2}, "has version 2; only version 1"),
        ({"code": 6}, "tokens have type 6, which is none of integers"),
        ({"documents": [[]]}, "lists no tokens"),
    ):
        write_megatron(prefix, **{"documents": DOCUMENTS, **wrong})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            load_corpus(settings, 256)
