"""Which kinds of models are known."""

from __future__ import annotations

from typing import Any

from dynpipe_ds.hf.families import GPT2, Family, Llama, LlamaMoE, Mixtral, Qwen2, Qwen3
from dynpipe_ds.hf.gemma import Gemma2, Gemma3

_FAMILIES: dict[str, type[Family]] = {
    "gemma2": Gemma2, "gemma3_text": Gemma3, "gpt2": GPT2, "llama": Llama, "llama_moe": LlamaMoE, "mixtral": Mixtral,
    "qwen2": Qwen2, "qwen3": Qwen3,
}  # fmt: skip


def family_of(config: Any) -> Family:
    """Find the family of a configuration.

    Args:
        config: a ``PreTrainedConfig``.

    Returns:
        The family, holding a copy of the configuration.

    Raises:
        ValueError: if models of this type can't be cut into layers here.
    """
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(
            f"model_type={config.model_type!r} is not one of {', '.join(_FAMILIES)}: write its layers as LayerSpecs "
            "of your own, as docs/huggingface.md shows for these"
        )
    return family(config)
