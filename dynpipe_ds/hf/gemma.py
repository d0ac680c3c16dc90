"""Gemma: a scaled embedding, norms behind attention and MLP too, attention that changes from block to block."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dynpipe_ds.hf.carry import Carry
from dynpipe_ds.hf.families import Family


class Gemma2(Family):
    """Gemma 2: every other block looks through a sliding window; scores and logits are capped."""

    package, prefix, architecture = "gemma2", "Gemma2", "Gemma2ForCausalLM"
    embedding_class: ClassVar[str] = "TextScaledWordEmbedding"
    halves: ClassVar[dict[str, tuple[str, ...]]] = {
        "attention": ("input_layernorm", "self_attn", "post_attention_layernorm"),
        "mlp": ("pre_feedforward_layernorm", "mlp", "post_feedforward_layernorm"),
    }

    def __init__(self, config: Any) -> None:
        if config.use_bidirectional_attention:
            raise ValueError(
                "use_bidirectional_attention=true: a causal language model does not see the tokens that follow; this "
                "is an encoder of embeddings"
            )
        super().__init__(config)

    def make_embedding(self) -> nn.Embedding:
        """Build the token embedding, which multiplies what it looks up by the root of the width."""
        config = self.config
        scale = config.hidden_size**0.5
        made: nn.Embedding = self._class(self.embedding_class)(
            config.vocab_size, config.hidden_size, config.pad_token_id, embed_scale=scale
        )
        made.embed_scale = torch.tensor(scale, device="cpu")  # made, not read
        return made

    def finish_logits(self, logits: Tensor) -> Tensor:
        """Cap them smoothly."""
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap


class Gemma3(Gemma2):
    """Gemma 3, text alone: other angles where the window slides; its attention normalises queries and keys."""

    package, prefix, architecture = "gemma3", "Gemma3", "Gemma3ForCausalLM"

    def angles(self, rotary: nn.Module, carry: Carry, index: int) -> Any:
        """Rotary angles of this kind of attention."""
        return rotary(carry.stream, carry.position_ids(), self.kind_of_attention(index))
