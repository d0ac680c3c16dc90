"""What belongs to a checkpoint and what DeepSpeed does not keep: random streams, counters, the controller.

Two kinds of files, of plain values and tensors only: ``common.pt`` (the same on every rank, written by the
first one) and ``rank_<n>.pt``.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn

from dynpipe_ds.checkpoint.profiles import pack, unpack
from dynpipe_ds.config import DynamicPipelineConfig
from dynpipe_ds.decide.balancer import Balancer
from dynpipe_ds.host import accelerator
from dynpipe_ds.measure.profile import PipelineProfile, smooth

if TYPE_CHECKING:
    from dynpipe_ds.run import Run

Plain = dict[str, Any]

ATTRIBUTES = "attributes_in_checkpoints"  # of a module: names of others of its attributes
_PROFILES = ("profiles", "newest", "measured")  # of the balancer's state: sequences of profiles, if they are there


def common_state(run: Run) -> Plain:
    """State that is the same on every rank: all that decisions rest on but :func:`rank_state`."""
    known = run.balancer.state_dict()
    packed = {key: pack(known[key]) for key in _PROFILES if key in known}
    return {
        "num_batches": run.num_batches,
        "controller": {**known, **packed},
        "repacking": run.repacking.state_dict(),
    }


def _balancer_state(common: Plain) -> Plain:
    """What the balancer takes in; older checkpoints keep the newest profiles, and only these, as JSON."""
    stored = common["controller"]
    if "profiles" not in stored:
        return {**stored, "newest": [PipelineProfile.loads(text) for text in stored["newest"]]}
    return {**stored, **{key: unpack(stored[key]) for key in _PROFILES if key in stored}}


def stored_profile(common: Plain, config: DynamicPipelineConfig) -> PipelineProfile | None:
    """The newest profiles in a checkpoint, smoothed; ``None`` if it has none."""
    balancer = Balancer(config)
    balancer.load_state_dict(_balancer_state(common))
    return smooth(balancer.newest, config.smoothing) if balancer.newest else None


def rank_state(run: Run, *, with_attributes: bool = True) -> Plain:
    """State of this rank: random streams and counters.

    Args:
        run: between two batches.
        with_attributes: whether with what layers keep on themselves; it travels with them otherwise.
    """
    attributes = {i: _attributes(layer) for i, layer in run.stage.local_layers().items()} if with_attributes else {}
    return {
        "random": _random_streams(),
        **run.stage.pipeline.micro_batch_counters(),
        "overhead": {key: float(seconds) for key, seconds in vars(run.overhead).items()},
        **run.profiler.state_dict(),
        "attributes": attributes,
    }


def restore(run: Run, common: Plain, of_rank: Plain, *, same_stages: bool, same_layers: bool = True) -> None:
    """Put back what :func:`common_state` and :func:`rank_state` gave, but for the layers' attributes.

    What was measured on stages is left out if their number is another, and all that was measured if layers are cut
    into parts otherwise.
    """
    run.num_batches = common["num_batches"]
    known = _balancer_state(common) if same_layers else Balancer(run.config).state_dict()  # of no batch
    run.balancer.load_state_dict(known, same_stages=same_stages)
    run.repacking.load_state_dict(common.get("repacking", {}), same_stages=same_stages)
    _set_random_streams(of_rank["random"])
    run.stage.pipeline.set_micro_batch_counters(of_rank)
    for key, seconds in of_rank["overhead"].items():
        setattr(run.overhead, key, seconds)
    run.profiler.load_state_dict(of_rank if same_stages and run.balancer.newest else {})


def _random_streams() -> Plain:
    version, keys, gauss = random.getstate()
    numpy_state: Any = numpy.random.get_state(legacy=False)
    numpy_keys = numpy_state["state"]["key"].astype(numpy.int64)  # weights_only reads tensors, no arrays
    streams: Plain = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(keys), gauss),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": torch.from_numpy(numpy_keys)}},
        "tracker": accelerator.tracked_states(),
    }
    on_device = accelerator.random_state()
    return streams if on_device is None else {**streams, "accelerator": on_device}


def _set_random_streams(streams: Plain) -> None:
    torch.set_rng_state(streams["torch"].clone())
    version, keys, gauss = streams["python"]
    random.setstate((version, tuple(keys.tolist()), gauss))
    numpy_keys = streams["numpy"]["state"]["key"].numpy().astype(numpy.uint32)
    numpy.random.set_state({**streams["numpy"], "state": {**streams["numpy"]["state"], "key": numpy_keys}})
    if streams["tracker"]:
        accelerator.set_tracked_states({k: s.clone() for k, s in streams["tracker"].items()})
    if "accelerator" in streams:
        accelerator.set_random_state(streams["accelerator"].clone())


def keep_in_checkpoints(module: nn.Module, *names: str) -> None:
    """Let checkpoints hold attributes of a module that its ``state_dict`` does not.

    Their values must be plain: numbers, texts, tensors, and tuples, lists and dicts of them. An attribute that
    a module does not have when it is saved is taken away from it when that is loaded. Each replica keeps its
    own values; with another number of replicas, replica r takes those of replica r modulo the old number.

    Args:
        module: a layer, or a module inside one.
        *names: of attributes; those of earlier calls stay.
    """
    known = getattr(module, ATTRIBUTES, ())
    setattr(module, ATTRIBUTES, tuple(dict.fromkeys((*known, *names))))


def _attributes(layer: nn.Module) -> dict[str, Plain]:
    """Values of the attributes that a layer's modules list, by module."""
    return {
        path: {name: vars(module)[name] for name in getattr(module, ATTRIBUTES) if name in vars(module)}
        for path, module in layer.named_modules()
        if getattr(module, ATTRIBUTES, ())
    }


def restore_attributes(layers: Mapping[int, nn.Module], stored: Mapping[int, dict[str, Plain]]) -> None:
    """Give layers the attributes that were stored with them, and take away those that were not there.

    Args:
        layers: modules by layer index.
        stored: ``rank_state(...)["attributes"]`` of the ranks that held them.
    """
    for i, layer in layers.items():
        for path, module in layer.named_modules():
            # Memory of its own: what was read may be a map of a file that is deleted later.
            values = copy.deepcopy(stored.get(i, {}).get(path, {}))
            if values:
                keep_in_checkpoints(module, *values)
            for name in getattr(module, ATTRIBUTES, ()):
                if name in values:
                    setattr(module, name, values[name])
                elif name in vars(module):
                    delattr(module, name)
