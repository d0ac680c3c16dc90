"""The ``"dynamic_pipeline"`` section as a JSON schema, by which editors complete and check a DeepSpeed JSON."""

from __future__ import annotations

from typing import Any

from dynpipe_ds.config import SECTION, DynamicPipelineConfig

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """The schema of a DeepSpeed JSON: the section by the classes that read it, every other key as it is.

    Contradictions between keys, and what depends on the model, are left to ``dynpipe doctor --config``.

    Returns:
        Values that JSON can hold.
    """
    section = DynamicPipelineConfig.model_json_schema()
    definitions = section.pop("$defs", {})
    for model in (section, *definitions.values()):
        _describe(model)
    return {
        "$schema": _DIALECT,
        "title": "DeepSpeed JSON with the section of dynpipe_ds",
        "type": "object",
        "properties": {SECTION: section},
        "$defs": definitions,
    }


def _describe(model: dict[str, Any]) -> None:
    """Put rule and example of every key where editors show them, behind its meaning."""
    model.pop("title", None)
    if "backend" in model["properties"]:  # by which the options' type is told, so it must be given
        model["required"] = sorted({*model.get("required", ()), "backend"})
    for key in model["properties"].values():
        rule, example = key.pop("rule"), key.pop("example")
        key.pop("title", None)
        key["description"] = f"{key['description']} Must be {rule}; for example {example}."
