"""How dynpipe_ds gets its engine out of ``deepspeed.initialize``, and from which DeepSpeed.

``deepspeed.initialize`` picks ``PipelineEngine`` by name and offers no registry. Instead of replacing
that name (which would break ``isinstance(engine, deepspeed.PipelineEngine)``), :func:`install` teaches
the class itself to construct a subclass when its model is a ``DynamicPipelineModule``. Every other
model gets exactly the engine it got before.
"""

from __future__ import annotations

import importlib
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import deepspeed
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from dynpipe_ds._versions import DEEPSPEED_RANGE, LEAST_DEEPSPEED, TESTED_SERIES, is_older
from dynpipe_ds.host.names import hooks_never_called, missing_names
from dynpipe_ds.migration.compiled import is_compiled_module


class DeepSpeedVersionError(RuntimeError):
    """The installed DeepSpeed trains wrongly, or lacks something that dynpipe_ds builds on."""


def why_unsupported() -> str:
    """The rule that the installed DeepSpeed breaks, to be read after its version; empty if it breaks none."""
    if is_older(str(deepspeed.__version__), LEAST_DEEPSPEED):
        return (
            f"is older than {LEAST_DEEPSPEED}, the first release whose pipeline gradients are right (before, every "
            "stage but the last divides them by the accumulation steps once more)"
        )
    missing = missing_names()
    if missing:
        return f"has no {', '.join(missing)}, which dynpipe_ds needs"
    unused = hooks_never_called()
    return f"never calls {', '.join(unused)}, in place of which dynpipe_ds puts its own" if unused else ""


def check_version() -> None:
    """Check that DeepSpeed is right and has what dynpipe_ds needs; warn when its series was not tested.

    Raises:
        DeepSpeedVersionError: if its gradients are wrong, or a needed class or method is gone, naming the remedy.
    """
    version = str(deepspeed.__version__)
    rule = why_unsupported()
    if rule:
        raise DeepSpeedVersionError(
            f"DeepSpeed {version} {rule}. Install a supported release: pip install '{DEEPSPEED_RANGE}'"
        )
    if not version.startswith(f"{TESTED_SERIES}."):
        warnings.warn(
            f"dynpipe_ds was tested with DeepSpeed {TESTED_SERIES}.x; {version} has every name it "
            "needs, but its behaviour was not checked; 'dynpipe doctor --numerics' does that",
            stacklevel=2,
        )


def install(module_class: type, choose: Callable[[type, Any, Any], type]) -> None:
    """Make ``PipelineEngine(model=m, ...)`` an engine of another class whenever ``m`` is a ``module_class``.

    One that ``torch.compile`` or ``peft`` has wrapped is refused: DeepSpeed takes it for a model without stages, and
    its ranks then send each other different layers until one of them crashes.

    Args:
        module_class: the pipeline module class that asks for it.
        choose: maps the class that was called, DeepSpeed's configuration (``None`` if none was given) and the model to
            the class of the engine, which derives from it.
    """

    def construct(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get("model"), module_class):
            return object.__new__(cls)
        return object.__new__(choose(cls, kwargs.get("config_class"), kwargs["model"]))

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("model")
        parts = model.modules() if isinstance(model, nn.Module) else ()
        pipeline = next((part for part in parts if isinstance(part, module_class)), None)
        if pipeline is not None:
            raise ValueError(_refused(model, pipeline))
        return object.__new__(cls)

    PipelineEngine.__new__ = construct
    deepspeed.DeepSpeedEngine.__new__ = refuse


def _refused(wrapped: Any, pipeline: nn.Module) -> str:
    """Why a pipeline module inside another module can't be trained."""
    name = type(pipeline).__name__
    what, remedy = (
        (f"torch.compile({name})", "call engine.compile(), which compiles layer by layer")
        if is_compiled_module(wrapped)
        else (f"{type(wrapped).__name__} around {name}", "wrap layers one by one before it gets them")
    )
    rule = "is no pipeline for DeepSpeed, and can't be cut"
    return f"{what} {rule}: give deepspeed.initialize the module itself, and {remedy}"


def init_distributed(backend: str | None = None) -> None:
    """``deepspeed.init_distributed`` without DeepSpeed's own all-reduce for inference, which training never calls.

    On CPUs DeepSpeed compiles it first, for up to a minute, and leaves 66 MB of shared memory for each rank in
    ``/dev/shm`` behind, under another name for every port.

    Args:
        backend: of the process group; ``None`` for the accelerator's.
    """
    operations: Any = importlib.import_module("deepspeed.ops")
    known = vars(operations).get("__compatible_ops__")
    operations.__compatible_ops__ = defaultdict(bool)  # none; up to 0.19.2 DeepSpeed asks for one that must be there
    try:
        deepspeed.init_distributed(backend, verbose=False)
    finally:
        del operations.__compatible_ops__  # DeepSpeed looks again when somebody asks
        if known is not None:
            operations.__compatible_ops__ = known
