"""``exit``: workers leave with exit code 0, and whoever started them sees it."""

from __future__ import annotations

from collections.abc import Sequence

from dynpipe_ds.release.base import ReleaseBackend


class ExitBackend(ReleaseBackend):
    """Nobody is told: leaving is all.

    It frees a bare Kubernetes pod and a pod of a Job without ``completions``; a launcher's other workers go on.
    """

    def release(self, ranks: Sequence[int], nodes: Sequence[str]) -> None:
        """Nothing is left to do once the workers have left."""
