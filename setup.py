"""Installer of dynpipe_ds: ``pip install -e .[dev]``."""

import runpy
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
versions = runpy.run_path(str(here / "dynpipe_ds" / "_versions.py"))

KUBERNETES = ["kubernetes>=29"]  # the release back-end of that name
WATCH = ["rich>=13"]  # the live view of `dynpipe watch`
BROWSER = ["playwright>=1.45"]  # drives an installed Chromium through the report page, in tests
HF = ["transformers>=5.23,<6", "safetensors>=0.5"]  # models of Hugging Face

setup(
    name="dynpipe_ds",
    version="0.1.0",
    description="Dynamic pipeline parallelism for DeepSpeed: stage boundaries that move while a model trains",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="the dynpipe_ds authors",
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
    packages=[
        *find_packages(include=["dynpipe_ds", "dynpipe_ds.*", "scenarios", "scenarios.*"]),
        "scenarios.conf",
    ],
    package_dir={"scenarios.conf": "conf"},
    package_data={"dynpipe_ds": ["py.typed"], "scenarios.conf": ["**/*.yaml", "**/*.json", "*.yaml"]},
    install_requires=[
        f"torch>={versions['LEAST_TORCH']}",
        versions["DEEPSPEED_RANGE"],
        "numpy",
        "pydantic>=2",
        "hydra-core>=1.3",
        "omegaconf>=2.3",
        "psutil",
        "matplotlib>=3.8",
        "tqdm",
        "ninja",  # DeepSpeed compiles its CPU operations with it
    ],
    entry_points={"console_scripts": ["dynpipe = dynpipe_ds.cli.main:main"]},
    extras_require={
        "kubernetes": KUBERNETES,
        "data": ["tokenizers>=0.15"],  # token ids from a JSON file of that library
        "hf": HF,
        "watch": WATCH,
        # The site that `make docs` builds.
        "docs": ["sphinx>=8", "myst-parser>=4", "furo>=2024.8", "sphinx-copybutton>=0.5"],
        "dev": [
            "pytest>=8", "pytest-timeout", "pytest-xdist>=3.6", "ruff>=0.6", "mypy>=1.11",
            *KUBERNETES, "kubernetes-validate>=1.31", *HF, *WATCH, *BROWSER,
        ],
    },
)
