"""Every scenario, stopped in the middle of its dynamism: a run built anew goes on with the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import run_ranks
from tests.scenarios.exactness import Job, assert_continued, go_on, train_and_save

PRUNING = {"start_batch": 1, "end_batch": 9, "every": 2, "crossover": 0.5}
FREEZING = {"batches": [2, 4, 7], "frozen": [1, 3, 2]}
EGERIA = {
    "first_batch": 0, "evaluate_every": 1, "refresh_every": 2, "window": 2, "tolerance": 0.5, "patience": 2,
    "reference_bits": 8,
}  # fmt: skip
AUTOFREEZE = {"first_batch": 0, "evaluate_every": 2, "percentile": 75.0, "first_module": 1}  # an interval has begun
EXITS = {
    "first_exit": 1, "exit_interval": 1, "first_batch": 2, "calibrate_every": 2, "target_share": 0.4, "audit_every": 4,
    "decay": None,
}  # fmt: skip
MOE = {"num_experts": 4, "every": 1, "routing": "loss_free", "bias_rate": 0.05, "capacity_factor": 1.0}
MOD = {"batches": [1, 4, 7], "capacity": [0.5, 0.25, 0.5], "blocks": [0, 2, 3]}

JOBS = {
    "pruning": Job("pruning", PRUNING),
    "pruning-blocks": Job("pruning", {**PRUNING, "structure": "block", "block_rows": 4, "crossover": 0.3}),
    "freezing": Job("freezing", FREEZING, optimizer="zero1_adamw"),
    "freezing-cache": Job("freezing", {**FREEZING, "cache": True}, shuffle="once", max_tokens=2 * 6 * 16 + 1),
    "freezing_egeria": Job("freezing_egeria", EGERIA),
    "freezing_autofreeze": Job("freezing_autofreeze", AUTOFREEZE),
    "early_exit": Job("early_exit", {**EXITS, "left_tokens": "visible"}),
    "early_exit_adpc": Job("early_exit_adpc", {**EXITS, "confidence": "probability", "loss_weights": "equal"}),
    "moe": Job("moe", MOE),
    "mod": Job("mod", MOD, optimizer="bf16_zero1"),
    "sparse_attention": Job("sparse_attention", {
        "batches": [1, 4, 7], "buckets": [4, 8, 2], "blocks": [0.5, 1.0, 1.0], "redraw_every": 3,
    }),
    "pruning_freezing": Job("pruning_freezing", {"parts": {"pruning": PRUNING, "freezing": FREEZING}}),
    "mod_moe": Job("mod_moe", {"parts": {"moe": MOE, "mod": MOD}}),
}  # fmt: skip

# What a report must show to have happened before the run was stopped, and what still changes afterwards.
CHANGING = {
    "pruning": "small weights", "pruning-blocks": "small weights", "pruning_freezing": "small weights",
    "freezing": "frozen layers", "freezing-cache": "frozen layers", "freezing_egeria": "frozen layers",
    "freezing_autofreeze": "frozen layers", "early_exit": "threshold", "early_exit_adpc": "threshold",
    "moe": "tokens per expert", "mod": "capacity", "mod_moe": "capacity", "sparse_attention": "buckets",
}  # fmt: skip


# Each on as many stages or on another number here, and on both in the matrix.
ON_TWO = ("pruning", "freezing_egeria", "early_exit", "moe", "mod", "sparse_attention", "pruning_freezing")
ON_THREE = tuple(name for name in JOBS if name not in ON_TWO)


@pytest.fixture(scope="module", params=[
    pytest.param(ON_TWO, id="2 stages", marks=pytest.mark.exhaustive), pytest.param(ON_THREE, id="2 to 3 stages"),
])
def continued(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, list[Any], list[Any]]:
    """Names, and results of whole runs on two stages, saved in the middle, and of those that went on from there."""
    folder, stages = str(tmp_path_factory.mktemp("stopped")), 2 if request.param is ON_TWO else 3
    jobs = {name: JOBS[name] for name in request.param}
    whole = run_ranks(train_and_save, 2, jobs, folder, timeout_s=240)
    jobs = {name: replace(job, stages=stages) for name, job in jobs.items()}
    return request.param, whole, run_ranks(go_on, stages, jobs, folder, timeout_s=240)


def test_scenarios_go_on(continued: tuple[Any, list[Any], list[Any]]) -> None:
    names, *results = continued
    for name in names:
        assert_continued(name, *results, changing=CHANGING[name])


# -- the matrix -------------------------------------------------------------------------------

Grid = tuple[int, int]  # stages, replicas


def stop_and_go_on(optimizer: str, before: Grid, after: Grid, folder: Path) -> tuple[list[Any], list[Any]]:
    """Train all scenarios on one grid and continue them on another, with the same global batch."""
    runs: list[Any] = []
    for (stages, replicas), function in ((before, train_and_save), (after, go_on)):
        batch = {"gradient_accumulation_steps": 4 // replicas}
        jobs = {
            name: replace(
                job, stages=stages, optimizer=optimizer, batch=batch,
                max_tokens=2 * 8 * 16 + 1 if "cache" in job.settings else job.max_tokens,
            ) for name, job in JOBS.items()
        }  # fmt: skip
        runs.append(run_ranks(function, stages * replicas, jobs, str(folder), timeout_s=280))
    return runs[0], runs[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("optimizer", "before", "after"),
    [
        ("fp32_adamw", (2, 1), (2, 1)),
        ("fp32_adamw", (2, 1), (3, 1)),
        ("fp32_adamw", (3, 1), (2, 1)),
        ("zero1_adamw", (2, 1), (2, 1)),
        ("zero1_adamw", (3, 1), (2, 1)),
        ("zero1_adamw", (2, 2), (2, 2)),
        ("bf16_zero1", (2, 1), (2, 1)),
        ("bf16_zero1", (2, 1), (3, 1)),
        ("fp32_adamw", (2, 2), (2, 2)),
    ],
)
def test_the_matrix(optimizer: str, before: Grid, after: Grid, tmp_path: Path) -> None:
    """The same bits wherever the arithmetic is the same."""
    reference, resumed = stop_and_go_on(optimizer, before, after, tmp_path)
    failed = {}
    for name in JOBS:
        try:
            assert_continued(name, reference, resumed)
        except AssertionError as error:
            failed[name] = str(error)
    assert not failed


@pytest.mark.exhaustive
@pytest.mark.parametrize(("before", "after"), [((2, 2), (4, 1)), ((4, 1), (2, 2))])
def test_another_number_of_replicas(before: Grid, after: Grid, tmp_path: Path) -> None:
    """Gradients are summed in another order, so the last bits differ."""
    reference, resumed = stop_and_go_on("fp32_adamw", before, after, tmp_path)
    gaps = {
        name: max(abs(a - b) for a, b in zip(reference[0][name].losses, resumed[0][name].losses, strict=True))
        for name in JOBS
    }
    assert all(gap < 2e-5 for gap in gaps.values()), gaps
