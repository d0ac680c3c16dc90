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

_MORE = """
Starts your own command for a few batches three times, without a change to its files: with DeepSpeed's PipelineModule,
with DynamicPipelineModule in its place, and with that while layers move to random places. Compares losses and weights
bit for bit and says why something differs, what is refused, and what the section costs a batch. Nothing is saved:
save_checkpoint is left out. All processes must run on this machine.
"""
_EXAMPLES = """
dynpipe try -- deepspeed --num_gpus 2 train.py --deepspeed_config ds_config.json
dynpipe try --move-every 2 --batches 20 --folder tried -- torchrun --nproc-per-node 4 train.py
dynpipe try --json -- bash run.sh
"""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = add_command(
        commands, "try", run, what="run an existing script with and without moving layers", more=_MORE,
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--batches", type=reading.whole(1), default=8, metavar="N", help="stop after so many batches (default 8)"
    )
    parser.add_argument(
        "--move-every", type=reading.whole(1), default=2, metavar="N", help="batches between two moves (default 2)"
    )
    parser.add_argument(
        "--seed", type=reading.whole(0), default=0, metavar="N", help="of the random boundaries (default 0)"
    )
    parser.add_argument(
        "--timeout", type=reading.seconds, default=300.0, metavar="S",
        help=f"give up when no batch was finished for so many seconds, {START} times that at the start (default 300)",
    )
    parser.add_argument(
        "--no-reasons", action="store_true", help="where something differs, don't run the script more often to see why"
    )
    parser.add_argument("--folder", metavar="DIR", help="keep the script's output and what was recorded there")
    parser.add_argument("command_line", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="your own start command")


def run(arguments: argparse.Namespace) -> Result:
    """Carry out the command.

    Raises:
        UsageError: without a command, or with a folder that is not empty.
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
