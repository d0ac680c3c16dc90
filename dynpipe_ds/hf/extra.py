"""The optional packages that this part needs."""

from __future__ import annotations

import importlib.util

_NEEDED = ("transformers", "safetensors")


def check_extra() -> None:
    """Refuse to go on without the packages of the extra ``hf``; imports none of them.

    Raises:
        ImportError: naming what is missing and how to install it.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"dynpipe_ds.hf needs {' and '.join(missing)}, not installed here: pip install 'dynpipe_ds[hf]'",
            name=missing[0],
        )
