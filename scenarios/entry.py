"""What every entry does around its job: compose the configuration, start ranks, say a mistake once.

Started by a launcher, a process is a rank and runs the job. Started by hand (``python -m scenarios.train``), it starts
the ranks, or with ``--multirun`` a sweep of jobs one after the other.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from scenarios.begun import check, expected, found
from scenarios.checking import read
from scenarios.export import check_target
from scenarios.launch import LaunchSettings, launch
from scenarios.opening import opening, was_told
from scenarios.overrides import explain
from scenarios.ranks import is_rank, num_ranks, rank
from scenarios.scenario import build_layers, build_scenario
from scenarios.settings import Settings, config_folder
from scenarios.sweep import Sweep

_MULTIRUN = {"--multirun", "-m"}
_GRACE_S = 30.0  # for the first rank to say what is wrong, before a launcher ends it because another rank has ended


def start(
    job: Callable[[Settings], None], module: str, *, sweeps: bool = False, resumes: bool = False
) -> None:
    """Run an entry; what is no fault of the code ends in one line, not in a traceback.

    Args:
        job: trains; called on every rank.
        module: the entry's name, to start ranks with.
        sweeps: whether its results make a table (``--multirun``).
        resumes: whether it goes on with an interrupted run that the output folder holds.
    """
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or Hydra itself would print what it has to say, and end each rank
    sweep = Sweep(module)

    @hydra.main(version_base=None, config_path=str(config_folder()), config_name="config")
    def task(config: DictConfig) -> None:
        try:
            if is_rank():
                _as_rank(job, _settings(config), resumes=resumes)
            elif HydraConfig.get().mode is RunMode.MULTIRUN:
                _add_to(sweep, config, sweeps)
            else:
                sys.exit(_launch(module, config, resumes=resumes))
        except ValueError as error:
            leave(str(error))

    sys.argv[1:] = sorted(sys.argv[1:], key=lambda word: word not in _MULTIRUN)  # or overrides before it are lost
    if is_rank() and _MULTIRUN.intersection(sys.argv[1:]):
        leave(f"a sweep starts the ranks of each job itself: python -m {module} {' '.join(sys.argv[1:])}")
    try:
        task()
    except (HydraException, OmegaConfBaseException) as error:
        leave(explain([word for word in sys.argv[1:] if not word.startswith("-")], error))
    sys.exit(sweep.finish())


def leave(message: str) -> NoReturn:
    """End this process with exit code 2; the first rank says why.

    Args:
        message: why, on one line.
    """
    if rank() > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(_GRACE_S)
        message = f"rank {rank()}: {message}"  # still alive: it is the only one with this error
    print(f"error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


def _settings(config: DictConfig) -> Settings:
    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ValueError("; ".join(f"{name} is missing: give {name}=…" for name in missing))
    values: Any = OmegaConf.to_container(config, resolve=True)
    return Settings.from_mapping(values)


def _as_rank(job: Callable[[Settings], None], settings: Settings, *, resumes: bool) -> None:
    """Run the job in a process that a launcher has started; the first says what it is, unless that has been said."""
    told = _opening(settings, num_ranks(), resumes=resumes)
    if rank() == 0 and not was_told():
        print(told, flush=True)
    job(settings)


def _opening(settings: Settings, ranks: int, *, resumes: bool) -> str:
    """What the run says first; what all ranks would refuse together is refused here, before they wait for others."""
    check_target(settings)
    job = expected(settings, ranks)
    stored = found(settings) if resumes else None
    if stored is not None:
        check(stored, job)
    return opening(job, ranks, resumes=resumes)


def _checked(config: DictConfig) -> tuple[Settings, LaunchSettings]:
    """Refuse here what all ranks would."""
    settings = _settings(config)
    build_layers(build_scenario(settings.scenario, settings.scenario_settings), settings.model)
    problems: list[str] = []
    values: Any = OmegaConf.to_container(config.launch, resolve=True)
    where = read("launch", LaunchSettings, values, problems)
    if where is None:
        raise ValueError("; ".join(problems))
    return settings, where


def _launch(module: str, config: DictConfig, *, resumes: bool) -> int:
    settings, where = _checked(config)
    told = _opening(settings, where.num_ranks, resumes=resumes)
    return launch(module, HydraConfig.get().overrides.task, where, told=told)


def _add_to(sweep: Sweep, config: DictConfig, sweeps: bool) -> None:
    context = HydraConfig.get()
    overrides = list(context.overrides.task)
    if not sweeps:
        raise ValueError(f"--multirun is for scenarios.train, not {sweep.module}")
    if any(override.lstrip("+").startswith("output_dir=") for override in overrides):
        raise ValueError("output_dir: each job of a sweep has a folder of its own; give hydra.sweep.dir=…")
    try:
        _, launch_settings = _checked(config)
    except ValueError as error:
        sweep.refuse(context.sweep.dir, overrides, str(error))
    else:
        sweep.run(context.sweep.dir, overrides, launch_settings)
