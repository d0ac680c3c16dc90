"""Installer of dynpipe_ds: ``pip install .``, for those who change it ``pip install -e '.[dev]'``."""

import re
import runpy
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
versions = runpy.run_path(str(here / "dynpipe_ds" / "_versions.py"))

KUBERNETES = ["kubernetes>=29"]  # the release back-end of that name
DATA = ["tokenizers>=0.15"]  # token ids from a JSON file of that library
FAST = ["numba>=0.60"]  # compiles what planning spends its time with
WATCH = ["rich>=13"]  # the live view of `dynpipe watch`
BROWSER = ["playwright>=1.45"]  # drives an installed Chromium through the report page, in tests
HF = ["transformers>=5.23,<6", "safetensors>=0.5"]  # models of Hugging Face
PEFT = [*HF, "peft>=0.21"]  # LoRA adapters on them
SCENARIOS = ["hydra-core>=1.3", "omegaconf>=2.3", "tqdm"]  # `python -m scenarios.train`, in a clone of the repository


def citation(key: str) -> str:
    """A value of CITATION.cff, the one place that says where the repository and the paper are; empty if not there."""
    found = re.search(rf'^ *{key}: *"?([^"\n]+)"?$', (here / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1].strip().rstrip("/") if found else ""


def project_urls() -> dict[str, str]:
    """Links beside the description in a package index; those into the repository once CITATION.cff says where it is."""
    urls = {"Paper that it follows": citation("url")}
    repository = citation("repository-code")
    if repository:
        urls["Source"] = repository
        urls["Documentation"] = f"{repository}/blob/main/docs/index.md"
        urls["Changelog"] = f"{repository}/blob/main/CHANGELOG.md"
        urls["Issues"] = f"{repository}/issues"
    return urls


def long_description() -> str:
    """The README for a package index, where a relative link leads nowhere.

    With ``repository-code`` in CITATION.cff, links and pictures lead into the repository; without it, links are their
    text alone, and pictures are left out.
    """
    text, repository = (here / "README.md").read_text(encoding="utf-8"), citation("repository-code")

    def link(found: re.Match[str]) -> str:
        mark, shown, target = found.groups()
        if re.match(r"\w+:|#", target):
            return found[0]
        if not repository:
            return "" if mark else shown
        return f"{mark}[{shown}]({repository}/{'raw' if mark else 'blob'}/main/{target})"

    return re.sub(r"(!?)\[([^\]\n]*)\]\(([^)\s]+)\)", link, text)


setup(
    name="dynpipe_ds",
    version="0.1.0",
    description="Dynamic pipeline parallelism for DeepSpeed: stage boundaries that move while a model trains",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    author="the dynpipe_ds authors",
    project_urls=project_urls(),
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords=["deepspeed", "pipeline parallelism", "load balancing", "dynamic models", "large language models"],
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=f">={versions['LEAST_PYTHON']}",
    packages=find_packages(include=["dynpipe_ds", "dynpipe_ds.*"]),
    package_data={"dynpipe_ds": ["py.typed"]},
    install_requires=[
        f"torch>={versions['LEAST_TORCH']}",
        versions["DEEPSPEED_RANGE"],
        "numpy",
        "pydantic>=2",
        "psutil",
        "matplotlib>=3.8",
        "ninja",  # DeepSpeed compiles its CPU operations with it
    ],
    entry_points={"console_scripts": ["dynpipe = dynpipe_ds.cli.main:main"]},
    extras_require={
        "kubernetes": KUBERNETES,
        "data": DATA,
        "hf": HF,
        "peft": PEFT,
        "scenarios": SCENARIOS,
        "fast": FAST,
        "watch": WATCH,
        # The site that `make docs` builds.
        "docs": ["sphinx>=8", "myst-parser>=4", "furo>=2024.8", "sphinx-copybutton>=0.5"],
        "dev": [
            "pytest>=8", "pytest-timeout", "pytest-xdist>=3.6", "ruff>=0.6", "mypy>=1.11", "jsonschema>=4",
            *SCENARIOS, *KUBERNETES, "kubernetes-validate>=1.31", *PEFT, *FAST, *WATCH, *BROWSER,
        ],
    },
)
