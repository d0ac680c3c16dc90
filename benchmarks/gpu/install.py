"""A fresh virtual environment from wheels, without network; needs nothing but Python.

python -m benchmarks.gpu.install WHEELS FOLDER

Where this Python has a torch with CUDA, the environment uses that one, and torch's wheels are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

_TORCHS_OWN = ("torch-", "triton-", "nvidia_", "cuda_")
_LOOK = "import json, sys, torch; print(json.dumps([torch.version.cuda, torch.__version__, sys.path]))"


def packages_with_torch() -> list[str]:
    """Folders in which this Python has a torch with CUDA and what it needs; empty if it has none."""
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, cwd="/")
    if done.returncode != 0:
        return []
    cuda, number, path = json.loads(done.stdout.splitlines()[-1])
    if not cuda:
        return []
    print(f"torch {number} for CUDA {cuda} is there and is used")
    return [folder for folder in path if Path(folder).name in ("site-packages", "dist-packages")]


def chosen(wheels: Path, *, with_torch: bool) -> list[str]:
    """Wheels to install.

    Args:
        wheels: folder.
        with_torch: whether torch and what it needs are to be taken from it.
    """
    names = sorted(path.name for path in wheels.glob("*.whl"))
    return [str(wheels / name) for name in names if with_torch or not name.lower().startswith(_TORCHS_OWN)]


def install(wheels: Path, folder: Path) -> str:
    """Make the environment.

    Args:
        wheels: made by ``make wheels``.
        folder: of the environment; what is there is removed.

    Returns:
        Why it can't be made; empty if it was.
    """
    there = packages_with_torch()
    files = chosen(wheels, with_torch=not there)
    if not files:
        return f"{wheels} holds no wheels; make wheels WHEELS={wheels} gathers them on a machine with network"
    if not there and not list(wheels.glob("torch-*.whl")):
        return f"neither this Python nor {wheels} has a torch with CUDA; make wheels CUDA_TORCH=torch==<version>"
    venv.create(folder, clear=True, with_pip=True, symlinks=True)
    python = folder / "bin" / "python"
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    if subprocess.run([*command, "--disable-pip-version-check", *files]).returncode != 0:
        return f"pip could not install the wheels of {wheels}; they must be for Python {sysconfig.get_python_version()}"
    if there:
        where = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()
        # They come behind the environment's own packages.
        Path(where, "with_torch.pth").write_text("\n".join(there) + "\n", encoding="utf-8")
    return ""


if __name__ == "__main__":
    if problem := install(Path(sys.argv[1]), Path(sys.argv[2])):
        sys.exit(print(f"make gpu: {problem}", file=sys.stderr) or 2)
