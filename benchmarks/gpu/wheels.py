"""``make wheels``: gather what ``make gpu`` needs on a machine without network.

python -m benchmarks.gpu.wheels FOLDER ['torch==2.13.0']

Wheels are for this Python and this kind of machine, in the versions that are installed here. Without the second
argument torch is left out, for machines that have one with CUDA already.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = ("dynpipe_ds", "pytest", "pytest-timeout")
NOT_FROM_HERE = ("torch", "triton")
"""torch comes as the device needs it, with what it needs; the project itself is run from its checkout."""


def pins() -> list[str]:
    """``name==version`` of all that is needed but torch, as installed here."""
    found: dict[str, str] = {}
    waiting = list(ROOTS)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found or name in NOT_FROM_HERE:
            continue
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            sys.exit(f"make wheels: {name} is not installed here; make env installs it")
        waiting += _needs(name)
    return sorted(f"{name}=={number}" for name, number in found.items() if name != "dynpipe-ds")


def _needs(name: str) -> Iterator[str]:
    for text in requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield requirement.name


def main(folder: Path, torch: str = "") -> None:
    """Gather them.

    Args:
        folder: made if it is missing.
        torch: a requirement, for example ``torch==2.13.0``; empty: no torch.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--wheel-dir", str(folder)]
    subprocess.run([*pip, "--no-deps", *pins()], check=True)
    if torch:
        subprocess.run([*pip, torch], check=True)
    wheels = list(folder.glob("*.whl"))
    print(f"{len(wheels)} wheels, {sum(path.stat().st_size for path in wheels) / 1e6:.0f} MB, in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
