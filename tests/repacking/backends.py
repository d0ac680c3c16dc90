"""Release back-ends of a site's own, for tests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dynpipe_ds.release import ReleaseBackend, ReleaseError


class Recording(ReleaseBackend):
    """Writes down what it is asked; refuses what it is told to.

    Args:
        folder: where to write.
        refuse: method that raises, ``""`` for none.
    """

    def __init__(self, folder: str, refuse: str = "") -> None:
        self._folder, self._refuse = Path(folder), refuse

    def _note(self, what: str, text: str = "") -> None:
        with (self._folder / "calls").open("a") as file:
            file.write(f"{what}{text}\n")
        if what == self._refuse:
            raise ReleaseError(f"{what} refused: the test wants it so")

    def check(self) -> None:
        if self._refuse == "check" and os.environ["RANK"] == "1":
            raise ReleaseError("no scheduler on this rank; use another back-end")

    def prepare(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        self._note("prepare", f" {list(ranks)} {len(nodes)}")

    def release(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        self._note("release", f" {list(ranks)}")

    def verify(self) -> None:
        self._note("verify")
