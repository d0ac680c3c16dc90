"""Dynamic pipeline parallelism for DeepSpeed.

Words, used everywhere in one sense: a *layer* is one entry of the module's layer list and the unit that
moves; a *stage* is one pipeline rank and its data-parallel replicas; a *partition* is ``S + 1``
boundaries, ``boundaries[s] <= layer < boundaries[s + 1]``; a *profile* is what each layer takes in time
and memory, the same on every rank; a *plan* is a partition with what it promises; *migration* carries it
out. Letters: L layers, S stages, M micro-batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dynpipe_ds._command_line import interrupts_end_quietly, is_entry

__version__ = "0.1.0"

if TYPE_CHECKING or not is_entry():
    from dynpipe_ds import _public
    from dynpipe_ds._public import *  # noqa: F403

    __all__ = _public.__all__
else:  # see _public
    interrupts_end_quietly()

    def __getattr__(name: str) -> Any:
        """A public name, or ``__all__``, imported when it is first asked for."""
        if name.startswith("_") and name != "__all__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module("dynpipe_ds._public"), name)
