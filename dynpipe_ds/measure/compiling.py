"""When ``torch.compile`` compiles: a batch in which it did tells nothing of layers, and what it takes is a cost."""

from __future__ import annotations

import sys
import time
from typing import Any, NamedTuple


class Compiled(NamedTuple):
    """What this process has compiled since it began to look.

    Attributes:
        number: how often torch turned to compiling.
        seconds: that this took.
        processor_s: processor seconds of this process meanwhile.
        falls_back: whether torch has given up on some code, which it runs without compiling since.
    """

    number: int = 0
    seconds: float = 0.0
    processor_s: float = 0.0
    falls_back: bool = False


_total = Compiled()
_began: tuple[float, float] | None = None


def compiled_so_far() -> Compiled:
    """What this process has compiled; looks from the first call on, and costs nothing where nothing is compiled."""
    _look()
    return _total._replace(falls_back=_falls_back())


def _look() -> None:
    """Let torch tell; ``torch._dynamo.reset()`` makes it forget whom."""
    callbacks: Any = sys.modules.get("torch._dynamo.callback")  # not imported here: that takes seconds
    handler = getattr(callbacks, "callback_handler", None)
    if handler is not None and _begins not in handler.start_callbacks:
        handler.register_start_callback(_begins)
        handler.register_end_callback(_ends)


def _begins(*_: Any) -> None:
    global _began
    _began = time.perf_counter(), time.process_time()


def _ends(*_: Any) -> None:
    global _total, _began
    if _began is not None:
        seconds, processor_s = time.perf_counter() - _began[0], time.process_time() - _began[1]
        _total = Compiled(_total.number + 1, _total.seconds + seconds, _total.processor_s + processor_s)
        _began = None


def _falls_back() -> bool:
    """Whether code was compiled for so many cases that torch compiles it for no other one."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    reasons = getattr(utils, "counters", {}).get("unimplemented", {})
    return any("recompile limit" in str(reason) or "cache_size_limit" in str(reason) for reason in reasons)
