"""The command line as a whole: help, examples, exit codes, errors of one line, output that is its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynpipe_ds.cli import main
from dynpipe_ds.cli.main import build_parser
from tests.cli.conftest import Command

ROOT = Path(__file__).parents[2]
COMMANDS = ("doctor", "profile", "plan", "simulate", "schema")
_FOLLOWS = r"(?:^|\n)\s*(dynpipe [^\n]+)"


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("workplace")
def test_the_examples_of_the_help_run(command: str, dynpipe: Command) -> None:
    """Every one, as printed; those with --json print nothing but JSON."""
    text = dynpipe(command, "--help").out
    examples = re.findall(_FOLLOWS, text.partition("examples:")[2])
    assert len(examples) >= 2
    assert "exit codes: 0" in text
    for example in examples:
        done = dynpipe(*shlex.split(example.partition(" > ")[0])[1:])
        # A machine may lack a compiler, say: the doctor's answer is then an answer, too.
        assert done.code in ((0, 1) if command == "doctor" else (0,)), f"{example}: {done.err}"
        if "--json" in example:
            assert done.json
        elif command != "doctor":
            assert not done.err


@pytest.mark.parametrize("command", ["try", "run", "join"])
def test_the_examples_of_what_starts_a_script_have_their_options_before_it(command: str, dynpipe: Command) -> None:
    """An option behind the address or the script would be taken for the script's own."""
    text = dynpipe(command, "--help").out
    examples = re.findall(_FOLLOWS, text.partition("examples:")[2])
    assert len(examples) >= 2
    for example in examples:
        started = build_parser(command).parse_args(shlex.split(example)[1:]).command_line
        assert started[:1] == ["--"] or not started[0].startswith("-"), example


@pytest.mark.usefixtures("workplace")
def test_the_commands_of_the_documentation_run(dynpipe: Command) -> None:
    """docs/cli.md: every block of commands, in its order, with files that earlier ones wrote."""
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("dynpipe ")]
    assert len(lines) >= 7
    # What starts a script of the user's is run in test_try.py and test_run.py, the demonstration in test_demo.py.
    started = tuple(f"dynpipe {command}" for command in ("try ", "run ", "join ", "demo", "watch ", "report "))
    for line in (line for line in lines if not line.startswith(started)):
        command, _, file = line.partition(" > ")
        done = dynpipe(*shlex.split(command, comments=True)[1:])
        assert done.code in ((0, 1) if " doctor" in command else (0,)), f"{line}: {done.err}"
        if file:
            Path(file.strip()).write_text(done.out, encoding="utf-8")


def test_help_names_every_command(dynpipe: Command) -> None:
    """The exit codes, too; and the version. Without arguments there is the same help."""
    done = dynpipe("--help")
    assert done.code == 0 and "exit codes: 0" in done.out
    assert all(re.search(rf"^ +{command} +\w", done.out, re.MULTILINE) for command in main.COMMANDS)
    assert re.match(r"dynpipe_ds \d", dynpipe("--version").out)
    assert dynpipe() == done


def test_the_help_says_of_each_command_what_the_command_says() -> None:
    """Though it imports none of them."""
    assert main.build_parser("").format_help() == main.build_parser().format_help()


def _imported(*arguments: str) -> set[str]:
    """What a command of its own process has imported; it did what it was asked."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dynpipe_ds", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == (2 if arguments == ("pln",) else 0), done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "dynpipe_ds.cli.main" in imported
    return imported


@pytest.mark.parametrize("arguments", [(), ("--help",), ("--version",), ("pln",)], ids=" ".join)
def test_help_imports_next_to_nothing(arguments: tuple[str, ...]) -> None:
    """So it is there at once."""
    assert not {name.split(".")[0] for name in _imported(*arguments)} & {"torch", "deepspeed", "numpy", "pydantic"}


@pytest.mark.parametrize(
    "line",
    [
        "schema", "simulate profile.json --partition 0,3,8 --schedule 1f1b,planned", "run --workers 2 -- true",
        *(f"{name} --help" for name in sorted(set(main.COMMANDS) - set(main.COMPUTING))),
    ],
)
@pytest.mark.usefixtures("workplace")
def test_what_needs_neither_torch_nor_deepspeed_imports_neither(line: str) -> None:
    """Both take seconds. A plan is compared with DeepSpeed's own, so it needs them when it runs."""
    assert not {name for name in _imported(*shlex.split(line)) if name.split(".")[0] in ("torch", "deepspeed")}


def test_the_command_line_has_all_public_names_when_they_are_asked_for() -> None:
    code = (
        "import sys; sys.argv = ['/usr/bin/dynpipe']\n"
        "import dynpipe_ds; assert 'torch' not in sys.modules\n"
        "from dynpipe_ds import telling, DynamicPipelineModule\n"
        "print(sorted(set(dynpipe_ds.__all__) - {name for name in dynpipe_ds.__all__ if getattr(dynpipe_ds, name)}))\n"
        "print(hasattr(dynpipe_ds, 'Nothing'), hasattr(dynpipe_ds, '_nothing'), len(dynpipe_ds.__all__) > 20)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.stdout.split("\n")[-3:] == ["[]", "False False True", ""], done.stderr


@pytest.mark.parametrize("imported", ["argparse", "torch"])
def test_ctrl_c_while_it_is_imported_ends_it_without_a_stack(tmp_path: Path, imported: str) -> None:
    """Importing takes seconds, in which there is nothing to clear up yet."""
    # A module of this name, found first, says that the moment has come and waits for it.
    (tmp_path / f"{imported}.py").write_text(
        "import sys, time\nprint('now', file=sys.stderr, flush=True)\ntime.sleep(60)\n", encoding="utf-8"
    )
    with subprocess.Popen(
        [sys.executable, "-m", "dynpipe_ds", "doctor"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    ) as started:  # fmt: skip
        assert started.stderr is not None and started.stderr.readline() == "now\n"
        started.send_signal(signal.SIGINT)
        out, err = started.communicate()
    assert (started.returncode, out, err) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(
    ("line", "code", "told"),
    [
        ("--jsn", 2, "unrecognized arguments: --jsn; see dynpipe --help"),
        ("pln profile.json", 2, "invalid choice: 'pln'"),
        ("plan", 2, "profile"),
        ("plan nowhere.json --stages 2", 2, "nowhere.json: no such file; write one with 'dynpipe profile'"),
        ("plan broken.json --stages 2", 2, "broken.json: not a valid profile"),
        ("plan profile.json", 2, "give the number of stages by --stages"),
        ("plan profile.json --stages none", 2, "'none' must be a whole number >= 1"),
        ("plan profile.json --stages 9", 2, "8 layers with 7 allowed cuts can't fill 9 stages"),
        ("plan profile.json --stages 2 --partitioner best", 2, "unknown partitioner 'best'; known: balanced"),
        ("plan profile.json --stages 2 --memory-cap-bytes 0", 2, "'0' must be a number of bytes >= 1"),
        ("plan profile.json --stages 2 --memory-cap-bytes 1KiB", 1, "exceed the cap of 1,024 bytes; raise"),
        ("plan profile.json --stages 2 --pinned-cuts a", 2, "must be whole numbers with commas"),
        ("plan profile.json --stages 2 --pinned-cuts 8", 2, "remove 8"),
        ("plan profile.json --stages 2 --current 0,3", 2, "have 2 entries; 2 stages need 3"),
        ("plan profile.json --stages 2 --stage-speeds 1,-1", 2, "finite numbers > 0"),
        ("plan profile.json --stages 2 --partitioner uniform --stage-speeds 1,2", 2, "can't honour it"),
        ("plan profile.json --stages 2 --import no_such_module", 2, "No module named 'no_such_module'"),
        ("plan profile.json --stages 2 --config broken.json", 2, "broken.json: not valid JSON"),
        ("plan profile.json --stages 2 --config list.json", 2, "dynamic_pipeline = []: must be an object"),
        ("plan profile.json --stages 2 --import bad_syntax", 1, "bad_syntax: can't be imported: SyntaxError"),
        ("plan profile.json --stages 2 --config wrong.json", 2, "error: wrong.json: min_gain = 2: must be a number"),
        ("plan profile.json --stages 2 --stagess 3", 2, "unrecognized arguments: --stagess 3; see dynpipe plan --help"),
        ("simulate profile.json", 2, "give one by --partition"),
        ("simulate profile.json --partition 0,9", 2, "partition 0,9"),
        ("simulate profile.json --partition a,b", 2, "partition 'a,b': must be boundaries such as"),
        ("simulate profile.json --partition ds_config.json", 2, "has no list 'boundaries'"),
        ("simulate profile.json --partition 0,4,8 --gantt x.gif", 2, "must end in one of .png"),
        ("simulate profile.json --partition 0,4,8 --activation-link-s -1", 2, "'-1' must be finite seconds"),
        ("simulate profile.json --partition 0,4,8 --activation-link-s 1,2", 2, "need one number, 1 numbers"),
        ("doctor --layers 8", 2, "--layers and --stages belong together"),
        ("doctor --port 70000", 2, "whole number from 1 to 65535"),
        ("doctor --config nowhere.json", 2, "nowhere.json: no such file"),
        ("profile my_model", 2, "must be package.module:function"),
        ("profile no_such_module:layers", 2, "No module named"),
        ("profile bad_syntax:layers", 1, "bad_syntax can't be imported: SyntaxError"),
        ("profile my_model:no_such", 2, "my_model has no function 'no_such'"),
    ],
)
def test_a_mistake_is_one_line(workplace: Path, dynpipe: Command, line: str, code: int, told: str) -> None:
    """On stderr, named after the command, with the documented exit code; nothing on stdout, no traceback."""
    (workplace / "broken.json").write_text("{", encoding="utf-8")
    (workplace / "bad_syntax.py").write_text("def layers(:", encoding="utf-8")
    (workplace / "wrong.json").write_text('{"dynamic_pipeline": {"min_gain": 2}}', encoding="utf-8")
    (workplace / "list.json").write_text('{"dynamic_pipeline": []}', encoding="utf-8")
    done = dynpipe(*line.split())
    assert (done.code, done.out) == (code, "")
    assert told in done.err and done.err.startswith("dynpipe")
    assert done.err.count("\n") == 1


def test_json_before_the_command_or_after_it(workplace: Path, dynpipe: Command) -> None:
    after = dynpipe("plan", "profile.json", "--stages", 2, "--json").json
    assert dynpipe("--json", "plan", "profile.json", "--stages", 2).json == after
    assert not dynpipe("plan", "profile.json", "--stages", 2).out.startswith("{")


@pytest.mark.parametrize("more", [(), ("--import", "mine")], ids=["alone", "with a module that imports DeepSpeed"])
def test_as_a_module_stdout_is_the_results_alone(workplace: Path, more: tuple[str, ...]) -> None:
    """``python -m dynpipe_ds … --json | jq``: nothing of DeepSpeed's, whoever imports it first."""
    (workplace / "mine.py").write_text("import deepspeed\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "dynpipe_ds", "plan", "profile.json", "--stages", "2", "--json", *more],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=workplace, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert json.loads(done.stdout)["boundaries"][-1] == 8, done.stderr
    assert done.returncode == 0
