"""A model folder of Hugging Face in the place of the shared GPT (needs the extra ``dynpipe_ds[hf]``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from deepspeed.pipe import LayerSpec
from torch import nn

from scenarios.checking import type_problems


@dataclass(frozen=True, kw_only=True)
class PretrainedModel:
    """A causal language model in a local folder, for ``model=hf``.

    Attributes:
        path: the folder.
        seq_len: tokens a sample.
        split_blocks: whether attention and MLP of a block are two layers; ``"auto"``: where a stage has few blocks.
        lora: arguments of ``peft.LoraConfig``, to train adapters in place of the weights; or ``path`` alone, the folder
            of adapters that are trained further. Without ``r`` and ``path`` the weights are trained.
    """

    path: str | None
    seq_len: int = 128
    split_blocks: bool | Literal["auto"] = False
    lora: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse a missing path, lengths that the model does not know, and adapters that there are none of."""
        if not self.path:
            raise ValueError("model.path is missing: model=hf needs a local model folder, model.path=/models/gpt2")
        longest = self.config.max_position_embeddings
        if not 1 <= self.seq_len <= longest:
            raise ValueError(f"model.seq_len={self.seq_len} must be between 1 and the model's {longest} positions")
        self._adapter()

    def _adapter(self) -> Any:
        """What ``causal_lm_layers`` takes as ``adapter=``; ``None``: the weights are trained."""
        given = {key: value for key, value in self.lora.items() if value is not None}
        if not given:
            return None
        if len(given) > 1 and "path" in given or not given.keys() & {"r", "path"}:
            raise ValueError(
                f"model.lora has {', '.join(sorted(given))}: set r (and further arguments of peft.LoraConfig) for new "
                "adapters, or path alone to train those of a folder further"
            )
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ValueError(f"model.lora needs peft: pip install 'dynpipe_ds[peft]' ({error})") from error
        if "path" in given:
            return str(given["path"])
        problems = type_problems("model.lora", LoraConfig, given)
        if problems:
            raise ValueError("; ".join(problems))
        return LoraConfig(**{"task_type": "CAUSAL_LM", **given})

    @property
    def adapters(self) -> str | None:
        """Which adapters are trained, in words; ``None`` for none."""
        path, rank = self.lora.get("path"), self.lora.get("r")
        return f"LoRA adapters of {path}" if path else None if rank is None else f"LoRA adapters of rank {rank}"

    @cached_property
    def _folder(self) -> Any:
        try:
            from dynpipe_ds.hf import PretrainedFolder
        except ImportError as error:
            raise ValueError(f"model=hf: {error}") from error
        assert self.path is not None
        return PretrainedFolder(self.path)

    @property
    def config(self) -> Any:
        """The folder's configuration."""
        return self._folder.config

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows."""
        return int(self.config.vocab_size)

    @property
    def tied(self) -> bool:
        """Whether the head uses the embedding's weight."""
        return bool(self.config.tie_word_embeddings)

    @property
    def dropout(self) -> float:
        """Largest dropout probability of the model."""
        names = ("attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout")
        return float(max(getattr(self.config, name, 0.0) for name in names))

    @property
    def num_experts(self) -> int:
        """Experts of a block; 0 for none."""
        return int(getattr(self.config, "num_local_experts", getattr(self.config, "num_experts", 0)))

    def expert_widths(self) -> list[list[int]]:
        """Rows that gate and up of each expert have, block by block."""
        config, each = self.config, self.num_experts
        sizes = getattr(config, "size_experts", None)
        if sizes is not None:
            return [list(map(int, widths)) for widths in sizes]
        is_cut = hasattr(config, "num_selects")  # LLaMA-MoE's experts are pieces of one MLP
        return [[int(config.intermediate_size) // (each if is_cut else 1)] * each] * self.depth

    def layers(
        self, *, router_loss_weight: float | None = None, experts: Callable[[Any], nn.Module] | None = None
    ) -> list[LayerSpec]:
        """List its layers; see ``dynpipe_ds.hf.causal_lm_layers``."""
        from dynpipe_ds.hf import causal_lm_layers

        return causal_lm_layers(
            self._folder, router_loss_weight=router_loss_weight, experts=experts, adapter=self._adapter()
        )
