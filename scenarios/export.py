"""Keep the trained model of a finished run: ``run.export=folder``.

With ``model=hf`` the folder is one that ``from_pretrained`` of ``transformers`` loads; with ``model.lora`` it
holds the adapters alone, for ``PeftModel.from_pretrained``. Of the shared GPT it holds

    model.json       the model's settings, the scenario, and the names of the other files
    layer_000.pt     the weights of the first layer of the pipeline, and so on: a dict, written by ``torch.save``

:func:`load_weights` reads all of them as one dict, by ``<layer>.<name within the layer>``: layer 0 is the embedding,
then come the blocks, and last the head. The names are the same wherever the pipeline was cut, and whether or not blocks
were cut into attention and MLP. A tied head has the embedding's weights once more.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dynpipe_ds import CheckpointError
from dynpipe_ds.ranks import together
from scenarios.pretrained import PretrainedModel
from scenarios.scenario import Engine, Scenario
from scenarios.settings import Settings

FORMAT = "scenarios.gpt/1"
_MODEL = "model.json"


def check_target(settings: Settings) -> None:
    """Refuse, before anything trains, a folder that holds something, and weights that are in no one place.

    Raises:
        ValueError: with the remedy.
    """
    if settings.run.export is None:
        return
    target = Path(settings.run.export)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(
            f"run.export={target} exists and is not an empty folder: give another name, or remove it"
        )
    is_gpt = not isinstance(settings.model, PretrainedModel)
    if is_gpt and settings.scenario_settings.get("expert_weights") == "sharded":
        raise ValueError(
            f"run.export={target}: with scenario.expert_weights=sharded no rank has all experts; set it to replicated"
        )


def export(engine: Any, scenario: Scenario, settings: Settings) -> None:
    """Write the model as the settings ask for, if they do; collective over all ranks.

    Args:
        engine: has trained it.
        scenario: has changed it.
        settings: the job.

    Raises:
        ValueError: on every rank, if any can't write; with the remedy.
    """
    if settings.run.export is None:
        return
    try:
        _export(engine, scenario, settings, Path(settings.run.export))
    except CheckpointError as error:
        raise ValueError(
            f"{error}; checkpoints of the run stay, so that the same command with another run.export goes on from there"
        ) from error


def _export(engine: Any, scenario: Scenario, settings: Settings, target: Path) -> None:
    if isinstance(settings.model, PretrainedModel):
        from dynpipe_ds.hf import save_pretrained

        assert settings.model.path is not None
        save_pretrained(engine, target, source=settings.model.path)
        return

    def failed(message: str) -> CheckpointError:
        return CheckpointError(f"the model was not exported to {target}: {message}")

    together(lambda: target.mkdir(parents=True, exist_ok=True), engine.device, failed)
    together(lambda: _write_layers(engine, scenario, target), engine.device, failed)
    first = dist.get_rank() == 0
    together(lambda: _write_model(engine, settings, target) if first else None, engine.device, failed)


def _write_layers(engine: Any, scenario: Scenario, target: Path) -> None:
    if engine.mpu.get_data_parallel_rank() != 0:
        return
    whole = scenario.whole_layers(engine)
    for index, layer in engine.local_layers().items():
        weights = {f"{whole[index]}.{name}": _alone(tensor) for name, tensor in layer.state_dict().items()}
        torch.save(weights, target / _file(index))


def _alone(tensor: Tensor) -> Tensor:
    """A copy on the CPU with storage of its own: an optimizer's flat buffer would be written whole."""
    return tensor.detach().cpu().clone()


def _write_model(engine: Engine, settings: Settings, target: Path) -> None:
    """Last, so that a folder with this file is complete."""
    values = {
        "format": FORMAT, "model": dataclasses.asdict(settings.model),  # type: ignore[call-overload]
        "scenario": {"name": settings.scenario, **settings.scenario_settings},
        "files": [_file(index) for index in range(engine.partition[-1])],
    }  # fmt: skip
    (target / _MODEL).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def _file(index: int) -> str:
    return f"layer_{index:03d}.pt"


def load_weights(folder: str | Path) -> dict[str, Tensor]:
    """Read an exported GPT.

    Args:
        folder: as given to ``run.export``.

    Returns:
        Weights by ``<layer>.<name within the layer>``.

    Raises:
        ValueError: if the folder holds no complete export of this form.
    """
    file = Path(folder) / _MODEL
    if not file.is_file():
        raise ValueError(f"{folder} has no {_MODEL}: give the folder of a finished run.export")
    described = json.loads(file.read_text(encoding="utf-8"))
    if described.get("format") != FORMAT:
        raise ValueError(f"{file}: its format is {described.get('format')!r}, not {FORMAT!r}")
    weights: dict[str, Tensor] = {}
    for name in described["files"]:
        weights |= torch.load(Path(folder) / name, weights_only=True)
    return weights
