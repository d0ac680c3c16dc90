"""Two processes prove to each other that they know the same word, and speak in lines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from dynpipe_ds.joining.wire import Wire, WireError


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    """Both ends of a connection."""
    ends = socket.socketpair()
    both = Wire(ends[0]), Wire(ends[1])
    yield both
    for wire in both:
        wire.close()


def meanwhile(action: Callable[[], object]) -> tuple[threading.Thread, list[Exception]]:
    errors: list[Exception] = []

    def run() -> None:
        try:
            action()
        except WireError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_both_know_the_word(wires: tuple[Wire, Wire]) -> None:
    called, caller = wires
    thread, errors = meanwhile(lambda: called.admit("word", 5.0))
    caller.introduce("word", 5.0)
    thread.join()
    assert not errors
    caller.send(layers=3, text="ä\nb")
    assert called.receive(5.0) == {"layers": 3, "text": "ä\nb"}


@pytest.mark.parametrize("knows", ["another", ""])
def test_who_does_not_know_it_is_found_out_by_both(wires: tuple[Wire, Wire], knows: str) -> None:
    called, caller = wires
    thread, errors = meanwhile(lambda: called.admit("word", 0.5))
    with pytest.raises(WireError, match="the token is another one"):
        caller.introduce(knows, 5.0)
    caller.send(proof="0" * 64)  # and goes on as if it did
    thread.join()
    assert [str(error) for error in errors] == ["the token is another one"]


def test_what_one_side_proved_can_not_be_said_again_by_the_other(wires: tuple[Wire, Wire]) -> None:
    """A mirror: whoever sends back what it hears knows nothing."""
    called, mirror = wires
    thread, errors = meanwhile(lambda: called.admit("word", 0.5))
    mirror.send(drawn="a")
    said = mirror.receive(5.0)
    mirror.send(proof=said["proof"])
    thread.join()
    assert errors


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"[1]\n", b'{"drawn": 7}\n', b"x" * 5000, b""])
def test_what_is_no_line_of_ours_is_refused(said: bytes) -> None:
    ours, theirs = socket.socketpair()
    wire = Wire(ours)
    with suppress(OSError):
        theirs.sendall(said)
    theirs.close()
    with pytest.raises(WireError):
        wire.admit("word", 1.0)
    wire.close()


def test_silence_is_bounded_and_hanging_up_is_seen(wires: tuple[Wire, Wire]) -> None:
    one, other = wires
    with pytest.raises(WireError, match="no answer in 0.1 s"):
        one.receive(0.1)
    assert one.is_open
    other.close()
    assert not one.is_open
    with pytest.raises(WireError, match="closed"):
        one.receive(1.0)
