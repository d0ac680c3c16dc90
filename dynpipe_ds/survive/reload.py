"""Going back to the newest checkpoint in place, where no snapshot is left of some stage.

Layers that nobody holds are built as at the start, and the checkpoint is loaded onto the ranks that are left. Data of
the batches since is read again. What can be refused is refused before a layer changes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from dynpipe_ds.checkpoint.load import Loading, Wanted
from dynpipe_ds.checkpoint.manifest import CheckpointError
from dynpipe_ds.host.module import layer_anew
from dynpipe_ds.migration.transaction import MigrationError, Transaction
from dynpipe_ds.ranks.agreement import together
from dynpipe_ds.snapshots.shared_data import SnapshotError, share_data
from dynpipe_ds.survive.landmarks import Groups, Landmark
from dynpipe_ds.survive.seats import CantGoOnError

if TYPE_CHECKING:
    from dynpipe_ds.run import Run


def reload(run: Run, until: int, why: SnapshotError) -> Landmark:
    """Go back to the newest checkpoint; collective over all ranks, which hold the layers of their stages or none.

    Args:
        run: whose batches are then those of the checkpoint; the batches since are to be trained again.
        until: batches that all ranks together have read, up to this number.
        why: no snapshot can be gone back to.

    Returns:
        The checkpoint.

    Raises:
        CantGoOnError: on every rank, with the same text, if it can't be.
    """
    kept = run.stage.pipeline.reading.kept
    kept.stop_reading_again()
    run.snapshots.store.forget()
    mark, problem = run.landmarks.newest_common()
    if problem:
        raise CantGoOnError(f"{why}; and {problem}")
    assert mark is not None, "there is no problem"
    _prepare_data(run, mark, until, why)
    try:
        _build_lost_layers(run, mark.groups)
        Loading(run, Path(mark.path), Wanted(), stays=True).run()
    except (MigrationError, CheckpointError, ValueError) as error:
        raise CantGoOnError(f"{why}; and {error}") from error
    run.balancer.ordering.adopt(None, run.stage.partition)
    run.repeating.went_back(run.landmarks.state_of(mark))
    return mark


def _prepare_data(run: Run, mark: Landmark, until: int, why: SnapshotError) -> None:
    """Have the micro-batches of the batches since: kept here, read again, or from another rank."""
    try:
        share_data(
            run, mark.batch, until, f"checkpoint {mark.path}", position=mark.position, kept_from=run.repeating.reached
        )
    except SnapshotError as error:
        raise CantGoOnError(
            f"{why}; and {error}; give an iterator with state_dict and load_state_dict, or say by engine.data_at how "
            "to read earlier batches"
        ) from error


def _build_lost_layers(run: Run, groups: Groups) -> None:
    stage, module, optimizer = run.stage, run.stage.module, run.stage.optimizer
    present, (first, stop) = module.local_layers(), stage.partition[stage.stage_id :][:2]

    def build() -> dict[int, nn.Module]:
        found, specs = {}, module.layer_specs()
        for index in range(first, stop):
            made = None if index in present else layer_anew(specs[index], index, module.surroundings.build)
            if made is not None:
                found[index] = stage.pipeline.as_trained(made)
        return found

    built = together(build, stage.device, ValueError)

    def take_in() -> None:
        module.install(module.placement, dict(sorted({**present, **built}.items())))
        stage.pipeline.name_parameters()
        if optimizer is not None:
            optimizer.prepare([], {
                parameter: groups[layer][name] for layer, made in built.items()
                for name, parameter in made.named_parameters() if name in groups.get(layer, {})
            })

    def put_back() -> None:
        module.install(module.placement, present)
        stage.pipeline.name_parameters()

    Transaction(optimizer, stage.device, "building lost layers anew").run(take_in, put_back, {})
    stage.settle()
    run.profiler.sizes_changed()
