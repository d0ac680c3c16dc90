"""Back-ends by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from dynpipe_ds.release.base import ReleaseBackend
from dynpipe_ds.release.options import ReleaseOptions

_BACKENDS = {
    "exit": "dynpipe_ds.release.exit:ExitBackend",
    "stay": "dynpipe_ds.release.stay:StayBackend",
    "slurm": "dynpipe_ds.release.slurm:SlurmBackend",
    "kubernetes": "dynpipe_ds.release.kubernetes:KubernetesBackend",
    "callback": "dynpipe_ds.release.callback:CallbackBackend",
}


def make_backend(options: ReleaseOptions) -> ReleaseBackend:
    """Make the back-end that the configuration names.

    Args:
        options: ``config.repack.release``.

    Returns:
        The back-end, not checked yet.

    Raises:
        ValueError: a site's own class can't be imported, is no back-end or does not take its options.
    """
    name = options.backend
    try:
        cls = find(_BACKENDS.get(name, name))
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"repack.release.backend = {name!r}: {error}; must be one of {', '.join(_BACKENDS)} or a class that "
            f'every rank can import, "package.module:Class"'
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, ReleaseBackend)):
        raise ValueError(
            f"repack.release.backend = {name!r}: {cls!r} is no release back-end; derive it from "
            f"dynpipe_ds.release.ReleaseBackend"
        )
    try:
        return cls(**options.arguments())
    except TypeError as error:
        raise ValueError(
            f"repack.release.backend = {name!r}: its class refuses the options {options.arguments()}: {error}; every "
            f'key but "backend" is an argument of the class'
        ) from error


def find(reference: str) -> Any:
    """Import what ``"package.module:name"`` refers to.

    Args:
        reference: module and name, apart by a colon.

    Raises:
        ImportError: no such module.
        AttributeError: no such name in it.
    """
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)
