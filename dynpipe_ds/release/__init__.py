"""Who gets the workers that re-packing frees: one small interface, one file a back-end.

:class:`ReleaseBackend` is the interface; ``docs/repacking.md`` shows how to write one.
"""

from dynpipe_ds.release.base import Constraints, ReleaseBackend, ReleaseError
from dynpipe_ds.release.registry import make_backend

__all__ = ["Constraints", "ReleaseBackend", "ReleaseError", "make_backend"]
