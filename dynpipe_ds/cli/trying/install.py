"""In a process of the script, right after DeepSpeed was imported: what the run's way asks for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any

from dynpipe_ds import DynamicPipelineEngine, DynamicPipelineModule, telling
from dynpipe_ds.cli.trying.record import Record
from dynpipe_ds.cli.trying.settings import SEED_LAYERS, Settings
from dynpipe_ds.cli.trying.watch import Watch
from dynpipe_ds.engine import EnabledEngine
from dynpipe_ds.host.scripts import (
    PIPELINE_ENGINE,
    PIPELINE_MODULE,
    change_configurations,
    make_dynamic,
    seed_layers,
)


def install(folder: str) -> None:
    """Change DeepSpeed in this process as the run in a folder wants it."""
    settings, record = Settings.load(Path(folder)), Record(Path(folder))
    telling.listeners.append(lambda text: record.say("warning", text=text))
    _record_errors(record)
    change_configurations(settings.config)
    if SEED_LAYERS in settings.changes:
        seed_layers()
    if settings.dynamic:
        make_dynamic(DynamicPipelineModule)
    else:
        _leave_out_moves()
    for engine_class in (PIPELINE_ENGINE, EnabledEngine):
        _watch(engine_class, settings, record)
    _record_failures(PIPELINE_MODULE, record)


def _record_errors(record: Record) -> None:
    """Also those that no engine raises."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        record.error(error)
        shown(kind, error, where)

    sys.excepthook = show


def _leave_out_moves() -> None:
    """A script that uses our classes already runs with the section switched off, and may not ask for moves then."""
    engine_class: Any = DynamicPipelineEngine
    engine_class.repartition = engine_class.rebalance = lambda self, *_, **__: None
    engine_class.on_rebalance = lambda self, callback: callback


def _watch(engine_class: type, settings: Settings, record: Record) -> None:
    """Watch every engine of a class once it is built."""

    def built(engine: Any) -> None:
        ours = isinstance(engine, EnabledEngine)
        # Our constructor calls DeepSpeed's: the engine is built when the outermost of the two returns.
        if ours == (engine_class is EnabledEngine):
            Watch(engine, settings, record)

    _record_failures(engine_class, record, built)


def _record_failures(cls: type, record: Record, built: Callable[[Any], None] = lambda _: None) -> None:
    original: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        with record.errors():
            original(self, *args, **kwargs)
            built(self)

    cls.__init__ = build  # type: ignore[misc]
