"""Text to a memory map: complete, and the same bytes however often it was interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from scenarios import prepare as module
from scenarios.data import DataSettings, load_corpus, loading
from scenarios.prepare import main, prepare
from tests.scenarios.data_files import article, write_tokenizer, write_wiki

ROOT = Path(__file__).parents[2]


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


class Interrupted(Exception):
    """In place of a signal."""


@pytest.fixture
def wiki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A small corpus in many small steps, and its settings."""
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(loading, "_ENCODED_TOGETHER_BYTES", 700)
    write_tokenizer(tmp_path / "tokenizer.json")
    write_wiki(tmp_path / "wiki", 120)
    return {"path": str(tmp_path / "wiki"), "format": "jsonl", "tokenizer": str(tmp_path / "tokenizer.json")}


def test_what_is_prepared_is_what_is_read(wiki: dict[str, Any], tmp_path: Path) -> None:
    """Tokens and documents equal those of the text; NumPy reads the files; a second call leaves them."""
    settings = DataSettings(**wiki)
    made = prepare(settings, tmp_path / "out")
    assert sorted(content(tmp_path / "out")) == ["documents.npy", "prepared.json", "tokens.npy"]
    expected = load_corpus(settings, 300)
    found = load_corpus(DataSettings(path=str(tmp_path / "out")), 300)
    assert isinstance(found.tokens, np.memmap) and found.tokens.dtype == expected.tokens.dtype == np.uint16
    assert np.array_equal(found.tokens, expected.tokens[:])
    assert found.documents is not None and np.array_equal(found.documents, expected.documents)
    assert np.array_equal(np.load(tmp_path / "out" / "tokens.npy"), found.tokens)
    assert (made["num_tokens"], made["num_documents"]) == (len(found.tokens), 120)
    before = content(tmp_path / "out")
    assert prepare(settings, tmp_path / "out") == made and content(tmp_path / "out") == before


@pytest.mark.parametrize("kind", ["jsonl", "text"])
def test_interrupted_anywhere(
    wiki: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in every step, before or after it is noted, with rubbish behind what counts: the same bytes."""
    monkeypatch.setattr("scenarios.data.text._BLOCK_BYTES", 500)
    settings = DataSettings(**{**wiki, "format": kind})
    made = prepare(settings, tmp_path / "whole", save_every_bytes=1500)
    whole, step, stops = content(tmp_path / "whole"), 0, 0

    def or_stop(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal step
            step += 1
            last = step == stops % 6 + 1
            result = None if last and stops % 2 else function(*args)
            if last:
                raise Interrupted
            return result

        return call

    monkeypatch.setattr(module, "_replace", or_stop(module._replace))
    monkeypatch.setattr(module, "encode", or_stop(module.encode))
    for attempt in range(100):
        step, stops = 0, attempt
        try:
            again = prepare(settings, tmp_path / "parts", save_every_bytes=1500)
            break
        except Interrupted:
            if (tmp_path / "parts" / "prepared.json").exists():
                continue
            for name in {"tokens.npy", "documents.npy"} & set(content(tmp_path / "parts")):
                with open(tmp_path / "parts" / name, "ab") as opened:
                    opened.write(b"rubbish")
            with pytest.raises(ValueError, match=r"has no prepared.json: .*run the same command again"):
                load_corpus(DataSettings(path=str(tmp_path / "parts"), format="memmap"), 300)
    assert stops > 10 and again == made and content(tmp_path / "parts") == whole


KILLED = """
import itertools, os, signal, sys, threading
from scenarios import prepare
replace, calls = prepare._replace, itertools.count()
def replace_or_die(*args):
    if next(calls) == 3:  # by another thread, while this one goes on
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGKILL)).start()
    return replace(*args)
prepare._replace = replace_or_die
prepare.main(sys.argv[1:])
"""


def test_killed_in_the_middle(tmp_path: Path) -> None:
    """A real process, killed where it happens to be; the command line continues."""
    source = tmp_path / "big.jsonl"
    text = " ".join(article(number) for number in range(40))
    line = json.dumps({"text": text}) + "\n"
    with open(source, "w", encoding="utf-8") as opened:
        for number in range(8_000_000 // len(line)):
            opened.write(json.dumps({"text": f"{number} {text}"}) + "\n")
    prepare(DataSettings(path=str(source)), tmp_path / "whole")
    command = [sys.executable, "-c", KILLED, source, tmp_path / "parts", "--save-every-mb", "0.1"]
    progress = tmp_path / "parts" / "progress.json"
    done = subprocess.run(
        list(map(str, command)), cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert 0 < _offset(progress) < source.stat().st_size
    main([str(source), str(tmp_path / "parts"), "--save-every-mb", "0.1"])
    assert content(tmp_path / "parts") == content(tmp_path / "whole")


def _offset(progress: Path) -> int:
    try:
        return int(json.loads(progress.read_text(encoding="utf-8"))["progress"]["offset"])
    except FileNotFoundError:
        return 0


def test_a_folder_that_holds_something_else(wiki: dict[str, Any], tmp_path: Path) -> None:
    """Nothing of others is overwritten; another job's tokens only when asked to."""
    settings, folder = DataSettings(**wiki), tmp_path / "out"
    prepare(settings, folder)
    other = DataSettings(**{**wiki, "end_of_document": "<pad>"})
    with pytest.raises(ValueError, match="made with another end_of_document: give the values of then, .*--restart"):
        prepare(other, folder)
    assert prepare(other, folder, restart=True)["num_documents"] == 120
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(ValueError, match=r"mine holds other files \(thesis.txt\): give an empty or a new folder"):
        prepare(settings, tmp_path / "mine")
    with module._locked(folder), pytest.raises(ValueError, match="out is being written by another process"):
        prepare(other, folder)
    (folder / "prepared.json").write_text("{")
    with pytest.raises(ValueError, match="prepared.json is damaged .*--restart"):
        prepare(other, folder)


def test_prepared_data_that_does_not_fit(wiki: dict[str, Any], tmp_path: Path) -> None:
    """The vocabulary is the tokenizer's, not what happens to occur; incomplete copies are found."""
    folder = tmp_path / "out"
    prepare(DataSettings(**wiki), folder)
    settings = DataSettings(path=str(folder), format="memmap")
    with pytest.raises(ValueError, match="made with 300 token ids, but model.vocab_size=299: set model.vocab_size=300"):
        load_corpus(settings, 299)
    np.save(folder / "tokens.npy", np.zeros(5, np.uint16))
    with pytest.raises(ValueError, match="has 5 tokens, but prepared.json says .*: it is not a complete copy"):
        load_corpus(settings, 300)
    with pytest.raises(ValueError, match="wiki has no prepared.json: it is not of scenarios.prepare"):
        load_corpus(DataSettings(path=wiki["path"], format="memmap"), 300)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Says how to train; a mistake is one line, with all problems."""
    (tmp_path / "book.txt").write_text("a book", encoding="utf-8")
    main([str(tmp_path / "book.txt"), str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "7 tokens of 1 documents" in printed and f"data=memmap data.path={tmp_path}/out" in printed
    with pytest.raises(SystemExit) as raised:
        main([str(tmp_path / "nowhere"), str(tmp_path / "new"), "--tokenizer", "gpt2"])
    assert "nowhere does not exist" in str(raised.value) and "gpt2 does not exist: give" in str(raised.value)
    assert not (tmp_path / "new").exists()
    with pytest.raises(SystemExit, match="book.npy is memmap, not text or jsonl: it needs no preparation"):
        main([str(tmp_path / "book.npy"), str(tmp_path / "new")])
    (tmp_path / "blank.jsonl").write_text('{"text": " "}\n')
    with pytest.raises(SystemExit, match="blank.jsonl holds no text"):
        main([str(tmp_path / "blank.jsonl"), str(tmp_path / "new")])


def test_a_mistake_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The corrected command works in the same folder; messages name the options of this command line."""
    (tmp_path / "a.jsonl").write_text('{"body": "x"}\n', encoding="utf-8")
    call = [str(tmp_path / "a.jsonl"), str(tmp_path / "out")]
    with pytest.raises(SystemExit, match=r"no text under 'text' \(it has: body\): set --text-key$"):
        main(call)
    main([*call, "--text-key", "body"])
    assert "2 tokens of 1 documents" in capsys.readouterr().out
    for wrong in ("nan", "0", "much"):
        with pytest.raises(SystemExit) as raised:
            main([*call, "--save-every-mb", wrong])
        assert raised.value.code == 2 and "must be a number greater than 0" in capsys.readouterr().err
