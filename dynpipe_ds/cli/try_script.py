"""``dynpipe try``: whether an existing script trains with the same bits, also while its layers move."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dynpipe_ds.cli import reading
from dynpipe_ds.cli.command import OK, PROBLEMS, Result, UsageError, add_command
from dynpipe_ds.cli.running import START, leaving_in_order
from dynpipe_ds.cli.trying.settings import DEEPSPEED, Settings
from dynpipe_ds.cli.trying.text import text_of, values_of
from dynpipe_ds.cli.trying.trial import carry_out


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(commands, "try", run)
    parser.option("--batches", "N", "batches of each run", reading.whole(1), default=8)
    parser.option("--move-every", "N", "batches between two moves", reading.whole(1), default=2)
    parser.option("--seed", "N", "seed of the random boundaries", reading.whole(0), default=0)
    patience = f"give up if no batch ends for this many seconds; {START} times that at the start"
    parser.option("--timeout", "S", patience, reading.seconds, default=300.0)
    parser.flag("--no-reasons", "if something differs, don't run the script again to find out why")
    parser.option("--folder", "DIR", "folder in which to keep the output and the records")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="your own start command")


def run(arguments: argparse.Namespace) -> Result:
    """Run an existing script with and without moving layers.

    Runs your own command three times for a few batches: with DeepSpeed's PipelineModule, with DynamicPipelineModule,
    and with the latter while layers move to random places. Your files are not edited. Compares losses and weights bit
    for bit. Says why something differs, what is refused, and what the section costs per batch. save_checkpoint is
    skipped. All processes must run on this machine.

    Examples:
      dynpipe try -- deepspeed --num_gpus 2 train.py --deepspeed_config ds_config.json
      dynpipe try --move-every 2 --batches 20 --folder tried -- torchrun --nproc-per-node 4 train.py
      dynpipe try --json -- bash run.sh
    """
    command = arguments.command_line[arguments.command_line[:1] == ["--"] :]
    if not command:
        raise UsageError("there is no command to try; give the one that starts your script after --")
    settings = Settings(DEEPSPEED, arguments.batches, arguments.move_every, arguments.seed)
    with leaving_in_order(), _folder(arguments.folder) as folder:
        trial = carry_out(
            command, settings, folder, timeout_s=arguments.timeout, ask_why=not arguments.no_reasons, tell=_teller()
        )
        if sys.stderr.isatty():
            print(file=sys.stderr)  # below the line that was written over and over
        values = values_of(trial)
        (folder / "result.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    return (OK if trial.good else PROBLEMS), text_of(trial), values


@contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    if given is None:
        with tempfile.TemporaryDirectory(prefix="dynpipe-try-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    folder = Path(given).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--folder {given}: must be empty or not there yet; name another one")
    folder.mkdir(parents=True, exist_ok=True)
    yield folder


def _teller() -> Callable[[str], None]:
    """Shows lines on stderr, one above the other on a terminal."""
    start, end = ("\r", "") if sys.stderr.isatty() else ("", "\n")
    last = ""

    def tell(line: str) -> None:
        nonlocal last
        if line != last:
            print(start + line.ljust(len(last) if start else 0), end=end, file=sys.stderr, flush=True)
        last = line

    return tell
