"""Writing a checkpoint: DeepSpeed's own files, a few of ours, and one rename that makes them count.

Steps, each ended by a vote of all ranks: agree on the tag; the first rank makes an empty folder; every rank
writes its files; the first rank writes the manifest, names the folder and then ``latest``. A failure before
the rename leaves everything as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from dynpipe_ds.checkpoint import folder
from dynpipe_ds.checkpoint.extras import common_state, rank_state
from dynpipe_ds.checkpoint.full_disk import naming_full_disk
from dynpipe_ds.checkpoint.manifest import (
    EXTRAS_FOLDER,
    MANIFEST_FILE,
    CheckpointError,
    FileEntry,
    LayerEntry,
    Manifest,
    OptimizerEntry,
    Slot,
    named_parameters,
    tensor_forms,
)
from dynpipe_ds.checkpoint.names import agree_on_place, place_problem, tag_problem
from dynpipe_ds.checkpoint.owned import owned_content, owned_file
from dynpipe_ds.checkpoint.plain import plain
from dynpipe_ds.host.files import (
    RecordingWriter,
    layer_file,
    model_file,
    not_covered,
    optimizer_file,
    recording,
    saved_parameters,
    write_files,
)
from dynpipe_ds.host.names import version
from dynpipe_ds.host.optimizers.flat import FlatOptimizer
from dynpipe_ds.host.pipeline import Pipeline
from dynpipe_ds.owning import owned_names
from dynpipe_ds.ranks.agreement import together

if TYPE_CHECKING:
    from dynpipe_ds.run import Run
    from dynpipe_ds.stage import Stage

T = TypeVar("T")

COMMON_FILE = f"{EXTRAS_FOLDER}/common.pt"


def rank_file(stage: int, replica: int) -> str:
    """Where a rank keeps what only it has."""
    return f"{EXTRAS_FOLDER}/stage_{stage:03d}_replica_{replica:03d}.pt"


def _our_layer_file(layer: int) -> str:
    return f"{EXTRAS_FOLDER}/layer_{layer:02d}-model_states.pt"


class Share(NamedTuple):
    """What one rank has written, and says of it for the manifest.

    Attributes:
        stage: its stage.
        replica: its data-parallel replica.
        files: size and checksum of what it wrote, by path.
        model_file: DeepSpeed's file of the stage.
        optimizer_file: DeepSpeed's file of its share of a flat optimizer's state; empty without one.
        layers: of the stage; on the first replica only, like ``slots``.
        slots: of the stage's optimizer.
    """

    stage: int
    replica: int
    files: dict[str, FileEntry]
    model_file: str
    optimizer_file: str
    layers: dict[int, LayerEntry]
    slots: tuple[Slot, ...]


def refuse_unsupported(pipeline: Pipeline) -> None:
    """Refuse what checkpoints of a dynamic pipeline don't cover, with the remedy.

    Raises:
        ValueError: naming the setting.
    """
    found = not_covered(pipeline)
    if found:
        raise ValueError(
            f"checkpoints of a dynamic pipeline don't cover {' and '.join(found)}; train without that, or without "
            '"dynamic_pipeline"'
        )


class Saving:
    """One checkpoint that is being written, on one rank.

    Args:
        run: what is saved.
        save_dir: folder of all checkpoints.
        tag: name of this one; the same on every rank.
        client_state: the user's own values, in DeepSpeed's files.
        exclude_frozen_parameters: as in DeepSpeed.
        earlier: the checkpoint that this rank may still be pushing to the disk.
    """

    def __init__(
        self, run: Run, save_dir: Path, tag: str, client_state: dict[str, Any], *,
        exclude_frozen_parameters: bool, earlier: folder.DiskSync,
    ) -> None:
        self._run, self._stage, self._pipeline = run, run.stage, run.stage.pipeline
        self._save_dir, self._tag, self._target = save_dir, tag, save_dir / tag
        self._client_state = client_state
        self._exclude_frozen = exclude_frozen_parameters
        self._earlier = earlier
        self._first = dist.get_rank() == 0

    def run(self, *, save_latest: bool) -> folder.DiskSync:
        """Carry it out; collective over all ranks.

        Args:
            save_latest: whether ``latest`` shall name it.

        Returns:
            This rank's files, on their way to the disk.

        Raises:
            ValueError: on every rank, with the same text, if the tag or its folder can't be used.
            CheckpointError: on every rank, with the same text, if any rank could not do its part.
        """
        self._agree_on_tag()
        try:
            self._client_state = self._together(lambda: plain(self._client_state, "client_state"))
            self._together(self._start)
            share = self._together(lambda: self._describe(self._write_files()))
            shares = self._gather(share)
            self._together(lambda: self._finish(shares, save_latest=save_latest))
        except CheckpointError:
            if self._first:
                folder.discard(self._target)
            raise
        return folder.DiskSync(str(self._target), self._written(share.files))

    def _together(self, action: Callable[[], T]) -> T:
        def run() -> T:
            with naming_full_disk(self._folder):
                return action()

        return together(run, self._stage.device, lambda message: CheckpointError(
            f"saving checkpoint {self._target} failed; earlier checkpoints are as they were ({message})"
        ))

    def _agree_on_tag(self) -> None:
        """All name the same, and the one before it is on the disk, so that one is there whatever fails now."""
        agree_on_place(self._target, tag_problem(self._tag))
        self._together(self._check_place)
        together(self._earlier.wait, self._stage.device, lambda message: CheckpointError(
            f"the checkpoint before {self._target} could not be pushed to the disk: {message}"
        ))

    def _check_place(self) -> None:
        problem = place_problem(self._save_dir, self._tag) if self._first else ""
        if problem:
            raise CheckpointError(problem)

    @property
    def _folder(self) -> Path:
        """Where it is written before it gets its name."""
        return folder.partial_folder(self._target)

    # -- steps --------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._first:
            folder.start(self._target)
            (self._folder / EXTRAS_FOLDER).mkdir()

    def _write_files(self) -> dict[str, FileEntry]:
        with recording(self._pipeline, self._folder) as writer:
            write_files(
                self._pipeline, self._save_dir, str(self._folder.relative_to(self._save_dir)), tag=self._tag,
                client_state=self._client_state, exclude_frozen=self._exclude_frozen,
            )
            self._write_our_files(writer)
            return writer.entries

    def _write_our_files(self, writer: RecordingWriter) -> None:
        if self._first:
            writer.save(common_state(self._run), str(self._folder / COMMON_FILE))
        writer.save(rank_state(self._run), str(self._folder / rank_file(self._stage.stage_id, self._pipeline.replica)))
        if self._pipeline.replica == 0:
            for layer, module in self._left_out().items():
                writer.save(dict(module.state_dict()), str(self._folder / _our_layer_file(layer)))
        for layer, module in self._stage.local_layers().items():
            content = owned_content(self._stage, module, exclude_frozen=self._exclude_frozen)
            if content:
                writer.save(content, str(self._folder / owned_file(layer, self._pipeline.replica)))

    def _left_out(self) -> dict[int, nn.Module]:
        """Layers that DeepSpeed does not save: tied ones that run by a ``forward_fn``."""
        module = self._stage.module
        functions = zip(module.local_indices(), module.forward_funcs, strict=True)
        layers = module.local_layers()
        return {i: layers[i] for i, function in functions if i in layers and not hasattr(function, "state_dict")}

    def _finish(self, shares: list[Share], *, save_latest: bool) -> None:
        if not self._first:
            return
        folder.write_text(self._folder / MANIFEST_FILE, self._manifest(shares).dumps())
        folder.publish(self._target)
        if save_latest:
            folder.write_latest(self._save_dir, self._tag)

    def _written(self, files: Iterable[str]) -> list[Path]:
        """What this rank has to push to the disk."""
        written = [self._target / path for path in files]
        if self._first:
            written += [self._target / MANIFEST_FILE, self._target / EXTRAS_FOLDER, self._target]
            latest = self._save_dir / "latest"
            written += [latest] if latest.exists() else []
            written += [self._target, *self._target.parents][1 : self._tag.count("/") + 2]  # up to save_dir
        return written

    # -- the manifest -------------------------------------------------------------------------

    def _gather(self, share: Share) -> list[Share]:
        """All shares, on the first rank."""
        shares: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(share, shares if self._first else None)
        return shares

    def _describe(self, files: dict[str, FileEntry]) -> Share:
        path = self._relative(model_file(self._pipeline, self._save_dir, self._tag))
        flat = ""
        if isinstance(self._stage.optimizer, FlatOptimizer):
            flat = self._relative(optimizer_file(self._pipeline, self._save_dir, self._tag))
        described = (self._layer_entries(), self._slots()) if self._pipeline.replica == 0 else ({}, ())
        return Share(self._stage.stage_id, self._pipeline.replica, files, path, flat, *described)

    def _relative(self, path: Path) -> str:
        return str(path.relative_to(self._target))

    def _layer_entries(self) -> dict[int, LayerEntry]:
        stage = self._stage
        names, left_out = stage.module.layer_names(), self._left_out()
        entries = {i: LayerEntry(names[i], None, {}, {}) for i in stage.module.local_indices()}
        for i, module in stage.local_layers().items():
            file = _our_layer_file(i)
            if i not in left_out:
                file = self._relative(layer_file(self._pipeline, self._target, i))
            trainable = {name: p.requires_grad for name, p in module.named_parameters()}
            forms = tensor_forms(module.state_dict())
            if self._exclude_frozen and i not in left_out:
                forms = {key: form for key, form in forms.items() if trainable.get(key, True)}
            owned = tuple(name for name in owned_names(module) if name in forms)
            files = tuple(owned_file(i, replica) for replica in range(stage.module.replica.count))
            entries[i] = LayerEntry(names[i], file, forms, trainable, dict.fromkeys(owned, files))
        return entries

    def _slots(self) -> tuple[Slot, ...]:
        stage = self._stage
        if stage.optimizer is None:
            return ()
        keys = {parameter: key for key, parameter in named_parameters(stage.local_layers()).items()}
        return tuple(
            Slot(keys.get(parameter), group, stage.pipeline.name_of(parameter))
            for group, members in enumerate(saved_parameters(stage.pipeline))
            for parameter in members
        )

    def _manifest(self, shares: list[Share]) -> Manifest:
        stage = self._stage
        ordered = sorted(shares, key=lambda share: (share.stage, share.replica))
        stages = [[share for share in ordered if share.stage == s] for s in range(stage.num_stages)]
        entries = {i: entry for share in shares for i, entry in share.layers.items()}
        flat = isinstance(stage.optimizer, FlatOptimizer)
        return Manifest(
            tag=self._tag,
            partition=stage.partition,
            num_replicas=len(stages[0]),
            layers=tuple(entries[i] for i in range(len(entries))),
            optimizer=optimizer_entry(stage),
            slots=tuple(replicas[0].slots for replicas in stages),
            model_files=tuple(replicas[0].model_file for replicas in stages),
            optimizer_files=tuple(tuple(s.optimizer_file for s in replicas) for replicas in stages) if flat else (),
            files=dict(sorted((path, entry) for share in shares for path, entry in share.files.items())),
            versions={"torch": torch.__version__, "deepspeed": version()},
            whole_layers=stage.module.whole_layers(),
        )


def optimizer_entry(stage: Stage) -> OptimizerEntry:
    """Kind of the engine's optimizer, as a manifest names it."""
    if stage.optimizer is None:
        return OptimizerEntry("none", "", 0)
    basic = stage.optimizer.groups.optimizer
    kind = "flat" if isinstance(stage.optimizer, FlatOptimizer) else "plain"
    return OptimizerEntry(kind, type(basic).__name__, len(basic.param_groups))
