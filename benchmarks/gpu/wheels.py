"""``make wheels``: gather what ``make gpu`` needs on a machine without network.

python -m benchmarks.gpu.wheels FOLDER [--torch torch==2.13.0] [--python 3.12]

Wheels are for this kind of machine, in the versions that are installed here. Without ``--torch`` it is left out, for
machines that have one with CUDA already.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOTS = ("dynpipe_ds", "pytest", "pytest-timeout")
EXTRAS = {"dynpipe-ds": "scenarios"}
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
        if requirement.marker is None or requirement.marker.evaluate({"extra": EXTRAS.get(name, "")}):
            yield requirement.name


def gather(what: str, folder: Path, python: str, *, with_needs: bool) -> None:
    """Get a wheel, or build it where there is none.

    Args:
        what: ``name==version``.
        folder: for it.
        python: version of Python that it is for; empty: this one.
        with_needs: whether what it needs comes along.
    """
    pip, common = [sys.executable, "-m", "pip"], ["--quiet", "--disable-pip-version-check", what]
    needs = [] if with_needs else ["--no-deps"]
    if python:
        options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}", f"--dest={folder}"]
        for kind in ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{n}" for n in range(17, 40))):
            options.append(f"--platform={kind}_{platform.machine()}")
        command = [*pip, "download", *options, *needs, *common]
        if subprocess.run(command, check=with_needs, capture_output=not with_needs).returncode == 0:
            return  # else it comes as source, and is built
    subprocess.run([*pip, "wheel", f"--wheel-dir={folder}", *needs, *common], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--torch", default="", help="for example torch==2.13.0; empty: none")
    parser.add_argument("--python", default="", help="version of the other machine's Python, if not this one's")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for pin in pins():
        gather(pin, options.folder, options.python, with_needs=False)
    if options.torch:
        gather(options.torch, options.folder, options.python, with_needs=True)
    wheels = list(options.folder.glob("*.whl"))
    print(f"{len(wheels)} wheels, {sum(path.stat().st_size for path in wheels) / 1e6:.0f} MB, in {options.folder}")


if __name__ == "__main__":
    main()
