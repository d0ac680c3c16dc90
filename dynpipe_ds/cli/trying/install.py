"""In a process of the script, right after DeepSpeed was imported: what the run's way asks for.

No name is replaced. ``PipelineModule(...)`` makes an object of our class, and a class that is derived from DeepSpeed's
module is derived from ours; so it does not matter by which name a script imports it. Engines become ours by themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.utils import set_random_seed

from dynpipe_ds import DynamicPipelineEngine, DynamicPipelineModule, telling
from dynpipe_ds.cli.trying.record import Record
from dynpipe_ds.cli.trying.settings import SEED_LAYERS, Settings
from dynpipe_ds.cli.trying.watch import Watch
from dynpipe_ds.engine import EnabledEngine


def install(folder: str) -> None:
    """Change DeepSpeed in this process as the run wants it.

    Args:
        folder: of the run, with its settings.
    """
    settings, record = Settings.load(Path(folder)), Record(Path(folder))
    telling.listeners.append(lambda text: record.say("warning", text=text))
    _record_errors(record)
    _change_configuration(settings)
    if SEED_LAYERS in settings.changes:
        _seed_layers()
    if settings.dynamic:
        _make_dynamic()
    else:
        _leave_out_moves()
    for engine_class in (deepspeed.PipelineEngine, EnabledEngine):
        _watch(engine_class, settings, record)
    _record_failures(deepspeed.PipelineModule, record)


def _record_errors(record: Record) -> None:
    """Also those that no engine raises."""
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        record.error(error)
        shown(kind, error, where)

    sys.excepthook = show


def _change_configuration(settings: Settings) -> None:
    """Every configuration, whether the script gives a path, a dictionary or an argument."""
    original = DeepSpeedConfig.__init__

    @wraps(original)
    def read(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config, dict):
            config = deepspeed.load_ds_config(str(config))
        original(self, settings.config(config), *args, **kwargs)

    DeepSpeedConfig.__init__ = read


def _seed_layers() -> None:
    original = deepspeed.PipelineModule.__init__

    @wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        # DeepSpeed's own function fails on the numpy integers that its partitioning leaves.
        seed_fn = kwargs.get("seed_fn") or (lambda seed: set_random_seed(int(seed)))
        original(self, *args, **{**kwargs, "seed_layers": True, "seed_fn": seed_fn})

    deepspeed.PipelineModule.__init__ = build


def _leave_out_moves() -> None:
    """A script that uses our classes already runs with the section switched off, and may not ask for moves then."""
    engine_class: Any = DynamicPipelineEngine
    engine_class.repartition = engine_class.rebalance = lambda self, *_, **__: None
    engine_class.on_rebalance = lambda self, callback: callback


def _make_dynamic() -> None:
    """Let DeepSpeed's classes be ours for what the script makes of them from now on."""
    module_class = deepspeed.PipelineModule

    def construct(cls: type, *_: Any, **__: Any) -> Any:
        return object.__new__(DynamicPipelineModule if cls is module_class else cls)

    module_class.__new__ = construct
    _derive_from(module_class, DynamicPipelineModule)


def _derive_from(theirs: Any, ours: Any) -> None:
    """Derive new subclasses of DeepSpeed's class from ours, as an adopter would write them."""

    def derived(cls: Any, /, **kwargs: Any) -> None:
        super(theirs, cls).__init_subclass__(**kwargs)
        if theirs in cls.__bases__:
            cls.__bases__ = tuple(ours if base is theirs else base for base in cls.__bases__)

    theirs.__init_subclass__ = classmethod(derived)


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
