"""The kinds of models that can be cut into layers: where their parts are, and what differs between them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dynpipe_ds.hf.carry import Carry
from dynpipe_ds.hf.experts import ExpertStacks, MakeExperts
from dynpipe_ds.hf.routing import add_up, joint_balance_loss, note_load

# A tensor as checkpoints store it: its name, and the part of a parameter that it is.
Piece = tuple[str, Tensor]


class Family:
    """A kind of model; the base describes Llama.

    Args:
        config: the model's configuration; a copy is kept, with attention and experts chosen as
            ``transformers`` chooses them.

    Attributes:
        config: that copy.
        package: where ``transformers`` has its classes.
        prefix: how their names begin.
        block_class: what follows it in the name of a block's class.
        architecture: class of the whole model.
        halves: of a block, norm and module of each half, which adds to the stream what the module answers; a second
            norm, if there is one, is of the answer.
    """

    embedding, blocks, norm, head = "model.embed_tokens", "model.layers", "model.norm", "lm_head"
    positions: str | None = None
    package, prefix, block_class, architecture = "llama", "Llama", "DecoderLayer", "LlamaForCausalLM"
    halves: ClassVar[dict[str, tuple[str, ...]]] = {
        "attention": ("input_layernorm", "self_attn"), "mlp": ("post_attention_layernorm", "mlp")
    }  # fmt: skip

    def __init__(self, config: Any) -> None:
        self.config = copy.deepcopy(config)
        self.base_class()(self.config)  # resolves what is left to the defaults; holds no weights

    def _class(self, kind: str) -> Any:
        module = import_module(f"transformers.models.{self.package}.modeling_{self.package}")
        return getattr(module, f"{self.prefix}{kind}")

    @property
    def tied(self) -> bool:
        """Whether the head uses the embedding's weight."""
        return bool(self.config.tie_word_embeddings)

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return int(self.config.num_hidden_layers)

    def base_class(self) -> Any:
        """Class that initialises the weights."""
        return self._class("PreTrainedModel")

    def make_block(self, index: int) -> nn.Module:
        """Build one block; raises ``ValueError`` from ``transformers`` if its sizes can't be."""
        return self._class(self.block_class)(self.config, index)  # type: ignore[no-any-return]

    def keep_half(self, block: nn.Module, half: str) -> None:
        """Let a block go of all but one half.

        Args:
            block: of this family.
            half: one of :attr:`halves`.
        """
        for name in {name for names in self.halves.values() for name in names} - set(self.halves[half]):
            setattr(block, name, None)

    def run_half(self, block: nn.Module, half: str, stream: Tensor, **attending: Any) -> Tensor:
        """Do what the block's own forward does there.

        Args:
            block: of which that half is left.
            half: which one.
            stream: ``[batch, seq, hidden]``.
            **attending: what the attention is given besides.
        """
        norm, module, *after = (getattr(block, name) for name in self.halves[half])
        if half == "attention":
            answer, _ = module(hidden_states=norm(stream), **attending)
        else:
            answer = module(norm(stream))
        for second_norm in after:
            answer = second_norm(answer)
        return stream + answer  # type: ignore[no-any-return]

    def make_embedding(self) -> nn.Embedding:
        """Build the token embedding."""
        padding = self.config.pad_token_id if self.positions is None else None
        return nn.Embedding(self.config.vocab_size, self.config.hidden_size, padding)

    def make_norm(self) -> nn.Module:
        """Build the norm before the head."""
        return self._class("RMSNorm")(self.config.hidden_size, eps=self.config.rms_norm_eps)  # type: ignore[no-any-return]

    def make_rotary(self) -> nn.Module | None:
        """Build what turns positions into angles, if the blocks take angles."""
        return self._class("RotaryEmbedding")(config=self.config)  # type: ignore[no-any-return]

    def kind_of_attention(self, index: int) -> str:
        """``"full_attention"`` or ``"sliding_attention"``.

        Args:
            index: of the block.
        """
        kinds = getattr(self.config, "layer_types", None)
        if kinds is not None:
            return str(kinds[index])
        return "full_attention" if getattr(self.config, "sliding_window", None) is None else "sliding_attention"

    def angles(self, rotary: nn.Module, carry: Carry, index: int) -> Any:
        """Rotary angles of a block.

        Args:
            rotary: made by :meth:`make_rotary`.
            carry: what comes into the block.
            index: of the block.
        """
        return rotary(carry.stream, carry.position_ids())

    def mask(self, carry: Carry, index: int) -> Tensor | None:
        """Attention mask of a block, as the model's own forward makes it.

        Args:
            carry: what comes into the block.
            index: of the block.
        """
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        is_sliding = self.kind_of_attention(index) == "sliding_attention"
        make = create_sliding_window_causal_mask if is_sliding else create_causal_mask
        mask: Tensor | None = make(
            config=self.config, inputs_embeds=carry.stream, attention_mask=carry.padding, past_key_values=None,
            position_ids=carry.position_ids(),
        )  # fmt: skip
        return mask

    def finish_logits(self, logits: Tensor) -> Tensor:
        """What the model does with ``[batch, seq, vocab]`` behind the head."""
        return logits

    def pieces(self, name: str, parameter: Tensor, first: int = 0) -> Iterator[Piece]:
        """Split a parameter into what checkpoints store; the views share its memory.

        Args:
            name: full name in the model.
            parameter: the parameter's data.
            first: number of its first row, where it is one replica's rows of a whole.
        """
        yield name, parameter

    def replace_experts(self, block: nn.Module, make: MakeExperts) -> None:
        """Let experts of a block be computed by another module.

        Args:
            block: of this family, with its weights if they are random.
            make: makes the module.

        Raises:
            ValueError: if the block has no experts, or such that can't be stacked.
        """
        raise ValueError(
            f"experts= needs a model with experts, but model_type={self.config.model_type!r} has none: leave it out"
        )

    # -- routers ------------------------------------------------------------------------------

    def routing_shape(self, weight: float | None) -> tuple[int, ...] | None:
        """Shape of what routers add up on the way to the loss; notes the weight in the configuration.

        Args:
            weight: of their loss; ``None`` for what the configuration says.
        """
        if weight:
            raise ValueError(
                f"router_loss_weight={weight} needs experts, but model_type={self.config.model_type!r} has none: "
                "leave it out"
            )
        return None

    def router(self, block: nn.Module) -> nn.Module | None:
        """The block's router, if it has one."""
        return getattr(getattr(block, "mlp", None), "gate", None)

    def route(self, block: nn.Module, output: Any, carry: Carry) -> None:
        """Note what a router has returned: its load on the block, its part of the loss in the activation."""

    def extra_loss(self, carry: Carry) -> Tensor:
        """The routers' weighted loss, a float32 scalar, when all blocks have run; 0 without routers."""
        return torch.zeros((), device=carry.stream.device)


class Llama(Family):
    """Llama."""


class Qwen2(Family):
    """Qwen2 and 2.5: Llama with biases; the last blocks may look through a sliding window."""

    package, prefix, architecture = "qwen2", "Qwen2", "Qwen2ForCausalLM"


class Qwen3(Family):
    """Qwen3: its attention normalises queries and keys."""

    package, prefix, architecture = "qwen3", "Qwen3", "Qwen3ForCausalLM"


class GPT2(Family):
    """GPT-2."""

    embedding, blocks, norm, head = "transformer.wte", "transformer.h", "transformer.ln_f", "lm_head"
    positions = "transformer.wpe"
    package, prefix, block_class, architecture = "gpt2", "GPT2", "Block", "GPT2LMHeadModel"
    halves: ClassVar[dict[str, tuple[str, ...]]] = {"attention": ("ln_1", "attn"), "mlp": ("ln_2", "mlp")}

    def __init__(self, config: Any) -> None:
        if config.add_cross_attention:
            raise ValueError("add_cross_attention=true: a pipeline of a causal language model has no encoder")
        super().__init__(config)

    def make_norm(self) -> nn.Module:
        """Build the norm before the head."""
        return nn.LayerNorm(self.config.hidden_size, eps=self.config.layer_norm_epsilon)

    def make_rotary(self) -> None:
        """Positions are added to the embedding instead."""


class Mixtral(Family):
    """Mixtral: experts in every block, one load-balancing loss over all of them."""

    package, prefix, architecture = "mixtral", "Mixtral", "MixtralForCausalLM"

    def pieces(self, name: str, parameter: Tensor, first: int = 0) -> Iterator[Piece]:
        """Split stacked experts into the matrices that Mixtral's files hold."""
        name = name.replace(".mlp.", ".block_sparse_moe.")
        prefix, _, kind = name.rpartition(".")
        if kind == "gate_up_proj":
            width = parameter.shape[1] // 2
            for expert, both in enumerate(parameter, first):
                yield f"{prefix}.{expert}.w1.weight", both[:width]
                yield f"{prefix}.{expert}.w3.weight", both[width:]
        elif kind == "down_proj" and prefix.endswith(".experts"):
            for expert, down in enumerate(parameter, first):
                yield f"{prefix}.{expert}.w2.weight", down
        else:
            yield name, parameter

    def replace_experts(self, block: nn.Module, make: MakeExperts) -> None:
        """Let experts be computed by another module."""
        own: Any = block.get_submodule("mlp.experts")
        weights = {"gate_up_proj": own.gate_up_proj, "down_proj": own.down_proj}
        block.get_submodule("mlp").experts = make(ExpertStacks(weights, ("gate_up_proj",), "down_proj", own.act_fn))

    def routing_shape(self, weight: float | None) -> tuple[int, ...] | None:
        """Choices and probabilities of every expert, ``[2, E]``."""
        if weight is not None:
            self.config.router_aux_loss_coef, self.config.output_router_logits = float(weight), weight > 0
        return (2, int(self.config.num_local_experts)) if self.config.output_router_logits else None

    def route(self, block: nn.Module, output: Any, carry: Carry) -> None:
        """Note chosen experts; add choices and probabilities up."""
        logits, _, chosen = output
        note_load(block, chosen, logits.shape[-1])
        if carry.routing is not None:
            carry.routing = add_up(carry.routing, logits, carry.padding, self.config.num_experts_per_tok)

    def extra_loss(self, carry: Carry) -> Tensor:
        """Mixtral's auxiliary loss times ``router_aux_loss_coef``."""
        assert carry.routing is not None
        batch, seq = carry.stream.shape[:2]
        rows: Tensor | float = float(batch * seq) if carry.padding is None else carry.padding.float().sum()
        return joint_balance_loss(carry.routing, rows * self.depth) * self.config.router_aux_loss_coef  # type: ignore[no-any-return]


_SPLIT_KINDS = ("weight_gate", "weight_up", "weight_down")


class LlamaMoE(Family):
    """LLaMA-MoE: experts in every block, whose balance losses are summed."""

    architecture = "LlamaMoEForCausalLM"

    def __init__(self, config: Any) -> None:
        problems = config.problems()
        if problems:
            raise ValueError("the model's config.json: " + "; ".join(problems))
        super().__init__(config)

    def make_block(self, index: int) -> nn.Module:
        """Build one block."""
        from dynpipe_ds.hf.llama_moe import build_block

        return build_block(self.config, index)

    def pieces(self, name: str, parameter: Tensor, first: int = 0) -> Iterator[Piece]:
        """Split stacked experts into the matrices that LLaMA-MoE's files hold."""
        if name.rpartition(".")[2] in _SPLIT_KINDS:
            for expert, matrix in enumerate(parameter, first):
                yield f"{name}.{expert}", matrix
        else:
            yield name, parameter

    def replace_experts(self, block: nn.Module, make: MakeExperts) -> None:
        """Stack the experts, and let them be computed by another module."""
        calculator: Any = block.get_submodule("mlp.calculator")
        own = calculator.experts
        widths = [len(matrix) for matrix in own.weight_gate]
        if len(set(widths)) > 1:
            raise ValueError(f"experts= needs experts of one width, but size_experts={widths} in a block: leave it out")
        weights = {kind: nn.Parameter(torch.stack([*getattr(own, kind)]).detach()) for kind in _SPLIT_KINDS}
        calculator.experts = make(ExpertStacks(weights, _SPLIT_KINDS[:2], _SPLIT_KINDS[2], own.act))

    def routing_shape(self, weight: float | None) -> tuple[int, ...] | None:
        """The sum of the blocks' losses, a scalar."""
        if weight is not None:
            self.config.gate_balance_loss_weight, self.config.gate_use_balance = float(weight), weight > 0
        return () if self.config.gate_use_balance else None

    def route(self, block: nn.Module, output: Any, carry: Carry) -> None:
        """Note chosen experts; add the loss up."""
        note_load(block, output.experts, self.config.num_experts)
        if carry.routing is not None:
            carry.routing = carry.routing + output.balance_loss

    def extra_loss(self, carry: Carry) -> Tensor:
        """The sum of the blocks' losses, weighted already."""
        assert carry.routing is not None
        return carry.routing


def initialise(family: Family, module: nn.Module) -> None:
    """Give a new module random weights, as ``transformers`` would."""
    base = family.base_class()(family.config)
    with torch.no_grad():
        module.apply(base._init_weights)
