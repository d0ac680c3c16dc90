"""``dynpipe doctor``: whether this machine and this configuration are ready to train."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dynpipe_ds.cli import reading
from dynpipe_ds.cli.checks import Check, check_config, check_machine
from dynpipe_ds.cli.command import OK, PROBLEMS, Result, UsageError, add_command
from dynpipe_ds.cli.numerics import check_numerics

DEFAULT_PORT = 29500  # DeepSpeed's launcher's own

_SIGNS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}

def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "doctor", run)
    parser.option("--config", "FILE", "DeepSpeed JSON to check")
    parser.flag("--numerics", "compare a small model, cut at several places, with the undivided one")
    parser.option("--layers", "L", "layers of the model; with --stages", reading.whole(1))
    parser.option("--stages", "N", "pipeline stages; with --layers", reading.whole(1))
    port = f"port of the first rank (default MASTER_PORT, else {DEFAULT_PORT})"
    parser.option("--port", "PORT", port, reading.whole(1))


def run(arguments: argparse.Namespace) -> Result:
    """Check this machine and a configuration.

    Checks versions, launcher, compiler, accelerator, network and the folder of compiled operations. --config adds all
    problems of a DeepSpeed JSON. --numerics trains a small model on two CPU processes, cut at several places, and
    compares losses, gradients and weights with the undivided model, in less than a minute. Nothing is changed.
    Warnings don't count as problems.

    Examples:
      dynpipe doctor
      dynpipe doctor --config ds_config.json
      dynpipe doctor --config ds_config.json --layers 8 --stages 4 --port 29600 --json
    """
    if (arguments.layers is None) != (arguments.stages is None):
        raise UsageError("--layers and --stages belong together: give both, or neither")
    if arguments.layers is not None and arguments.config is None:
        raise UsageError("--layers and --stages are for checking a configuration: give it by --config")
    port = _port(arguments.port)
    config = reading.json_object(arguments.config)
    checks = list(check_machine(port))
    if arguments.config is not None:
        checks += check_config(config, num_layers=arguments.layers, num_stages=arguments.stages)
    if arguments.numerics:
        checks += check_numerics()
    is_good = all(check.status != "problem" for check in checks)
    values = {"ok": is_good, "checks": [asdict(check) for check in checks]}
    return (OK if is_good else PROBLEMS), _text(checks), values


def _port(given: int | None) -> int:
    text = str(given or os.environ.get("MASTER_PORT", DEFAULT_PORT))
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        where = "--port" if given else "MASTER_PORT"
        raise UsageError(f"{where} {text}: must be a whole number from 1 to 65535, such as {DEFAULT_PORT}")
    return int(text)


def _text(checks: Sequence[Check]) -> str:
    width = max(len(check.name) for check in checks)
    indent = " " * (width + 11)
    remedies = textwrap.TextWrapper(
        110, f"{indent}-> ", f"{indent}   ", break_long_words=False, break_on_hyphens=False
    )  # fmt: skip
    lines = []
    for check in checks:
        lines += [f"{_SIGNS[check.status]}  {check.name:{width}}  {check.found}", *remedies.wrap(check.remedy)]
    counts = Counter(check.status for check in checks)
    told = [f"{counts[s]} {s}{'' if counts[s] == 1 else 's'}" for s in ("problem", "warning") if counts[s]]
    return "\n".join([*lines, "", ", ".join(told) or "all is well"])
