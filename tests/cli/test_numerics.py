"""``dynpipe doctor --numerics``: it finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynpipe_ds.cli.checks import Check
from dynpipe_ds.cli.numerics import rank
from dynpipe_ds.cli.numerics.cases import MODES, Mode
from dynpipe_ds.cli.numerics.check import check_mode
from dynpipe_ds.cli.numerics.record import Record
from dynpipe_ds.cli.numerics.reference import train_undivided
from tests.cli.mutants import MUTANTS, Patches
from tests.distributed.ranks import run_ranks

TYPICAL = [
    "dropped_clip", "norm_of_the_first_stage", "gradient_divided_twice", "tied_gradients_added_once_too_few",
    "layers_dropped_by_a_stale_count", "lost_layer",
]  # fmt: skip
COMPUTING = [name for name, mutant in MUTANTS.items() if not mutant.breaks]

by_name: dict[str, Mode] = {mode.name: mode for mode in MODES}


def train_mutants(_rank: int, folder: str, names: list[str]) -> None:
    """Each in the mode where it shows, in a folder of its own."""
    for name in names:
        place = Path(folder) / name
        place.mkdir(exist_ok=True)
        with Patches() as patches:
            MUTANTS[name].apply(patches)
            rank.run_rank(place, [by_name[MUTANTS[name].mode]])


@pytest.fixture(scope="module")
def references() -> dict[str, Record]:
    """What the undivided model gives, by mode."""
    return {mode.name: train_undivided(mode) for mode in MODES}


def told(checks: list[Check]) -> str:
    """All problems."""
    return "\n".join(f"{check.name}: {check.found}" for check in checks if check.status == "problem")


def test_faults_are_found_in_their_mode(tmp_path: Path, references: dict[str, Record]) -> None:
    """The faults that were feared most; the whole command finds these and all others in the next test but one."""
    run_ranks(train_mutants, 2, str(tmp_path), TYPICAL)
    for name in TYPICAL:
        mode = by_name[MUTANTS[name].mode]
        found = told(list(check_mode(tmp_path / name, mode, references[mode.name])))
        assert MUTANTS[name].told in found, f"{name}: {found or 'not found'}"
