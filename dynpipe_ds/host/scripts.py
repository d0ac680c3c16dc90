"""DeepSpeed's classes as a script uses them, changed in this process for what the script does from now on.

No name is replaced, so it does not matter by which name a script has imported them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import deepspeed
from deepspeed.runtime.config import DeepSpeedConfig

from dynpipe_ds.host.seeds import seed_streams

PIPELINE_ENGINE: Any = deepspeed.PipelineEngine
PIPELINE_MODULE: Any = deepspeed.PipelineModule


def change_configurations(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change every configuration, whether the script gives a path, a dictionary or an argument."""
    original = DeepSpeedConfig.__init__

    @wraps(original)
    def read(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config, dict):
            config = deepspeed.load_ds_config(str(config))
        original(self, change(config), *args, **kwargs)

    DeepSpeedConfig.__init__ = read


def seed_layers() -> None:
    """Let every pipeline module seed its layers."""
    original = PIPELINE_MODULE.__init__

    @wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        # DeepSpeed's own function fails on the numpy integers that its partitioning leaves.
        original(self, *args, **{**kwargs, "seed_layers": True, "seed_fn": kwargs.get("seed_fn") or seed_streams})

    PIPELINE_MODULE.__init__ = build


def make_dynamic(module_class: type) -> None:
    """Let DeepSpeed's module be ours: ``PipelineModule(...)`` makes ours, and new subclasses derive from ours.

    Engines follow by themselves.
    """

    def construct(cls: type, *_: Any, **__: Any) -> Any:
        return object.__new__(module_class if cls is PIPELINE_MODULE else cls)

    def derived(cls: Any, /, **kwargs: Any) -> None:
        """Derive it from ours, as an adopter would write it."""
        super(PIPELINE_MODULE, cls).__init_subclass__(**kwargs)
        if PIPELINE_MODULE in cls.__bases__:
            cls.__bases__ = tuple(module_class if base is PIPELINE_MODULE else base for base in cls.__bases__)

    PIPELINE_MODULE.__new__ = construct
    PIPELINE_MODULE.__init_subclass__ = classmethod(derived)
