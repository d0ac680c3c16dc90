"""The table of a re-packed run, and the entry by the launcher."""

from __future__ import annotations

from dynpipe_ds import RepackEvent
from scenarios.repack import Run, table


def test_table() -> None:
    """Batches by number of workers, beside the same batches of the run that kept all."""
    event = RepackEvent(
        batch=2, before=(0, 2, 4), after=(0, 4), released_ranks=(1,), released=False, reason="test", plan_s=0.1,
        migrate_s=0.2, regroup_s=0.3,
    )
    everyone = Run(losses=[3.0, 2.0, 1.0], batches_s=[1.0, 1.0, 0.5], workers=[2, 2, 2], tokens=100)
    repacked = Run(losses=[3.0, 2.0, 1.0], batches_s=[1.0, 1.0, 0.8], workers=[2, 2, 1], events=[event], tokens=100)
    lines = table(everyone, repacked).splitlines()
    assert lines[2].split() == ["2", "2", "100", "50", "100", "50"]
    assert lines[3].split() == ["1", "1", "125", "125", "200", "100", "0.60", "s"]
    assert "average number of workers: 1.67 of 2" in lines
    assert "losses of all 3 batches: equal bits" in lines
    repacked.losses[1] = 2.5
    assert "losses of all 3 batches: DIFFER" in table(everyone, repacked)
