"""Tiny models of transformers and the folders they are saved to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCABULARY, LENGTH = 64, 12
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 4}
LLAMA = {**SIZES, "intermediate_size": 32, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {**LLAMA, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
SPLIT = {**LLAMA, "num_experts": 4, "num_selects": 2, "gate_balance_loss_weight": 0.3}
WINDOW = {"sliding_window": 4, "max_position_embeddings": 64}
QWEN = {**LLAMA, **WINDOW, "use_sliding_window": True, "max_window_layers": 2, "pad_token_id": 0}
GEMMA = {**LLAMA, **WINDOW, "head_dim": 8, "query_pre_attn_scalar": 4, "pad_token_id": 0}
NAMES = ("gpt2", "llama", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3_text")


def config(name: str, **changes: Any) -> Any:
    """Configuration of a tiny model."""
    import transformers

    if name == "gpt2":
        own = {**SIZES, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2Config(**{**own, **changes})
    if name == "llama":
        return transformers.LlamaConfig(**{**LLAMA, "pad_token_id": 0, **changes})
    if name in ("qwen2", "qwen3"):
        made = transformers.Qwen2Config if name == "qwen2" else transformers.Qwen3Config
        return made(**{**QWEN, **({"head_dim": 12} if name == "qwen3" else {}), **changes})
    if name == "gemma2":
        return transformers.Gemma2Config(**{**GEMMA, "final_logit_softcapping": 3.0, **changes})
    if name == "gemma3_text":
        return transformers.Gemma3TextConfig(**{**GEMMA, "sliding_window_pattern": 2, **changes})
    if name == "mixtral":
        return transformers.MixtralConfig(**{**EXPERTS, **changes})
    from dynpipe_ds.hf.llama_moe import LlamaMoEConfig

    return LlamaMoEConfig(**{**SPLIT, **changes})


def write(name: str, folder: Path, *, max_shard: str = "20KB", **changes: Any) -> Path:
    """Save a randomly initialised model, as transformers does it, in several shards."""
    import transformers

    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config(name, **changes))
    model.save_pretrained(folder, max_shard_size=max_shard)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def write_with_bytes(folder: Path, **changes: Any) -> Path:
    """Save a GPT-2 with a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: i for i, letter in enumerate(["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    write("gpt2", folder, vocab_size=len(letters), **changes)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return folder


def write_llama_moe(folder: Path, **changes: Any) -> Path:
    """Save random weights under the names that LLaMA-MoE's files have."""
    from safetensors.torch import save_file

    made = config("llama_moe", **changes)
    hidden, vocabulary = made.hidden_size, made.vocab_size
    head = hidden // made.num_attention_heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden), "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }  # fmt: skip
    for layer in range(made.num_hidden_layers):
        block = f"model.layers.{layer}."
        shapes |= {f"{block}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
        shapes |= {f"{block}self_attn.{kind}_proj.weight": (hidden, hidden) for kind in "qo"}
        shapes |= {f"{block}self_attn.{kind}_proj.weight": (head, hidden) for kind in "kv"}
        shapes[f"{block}mlp.gate.gate_network.0.weight"] = (made.num_experts, hidden)
        shapes[f"{block}mlp.gate.gate_network.2.weight"] = (made.num_experts, made.num_experts)
        shapes[f"{block}mlp.gate.weight_noise.weight"] = (made.num_experts, hidden)
        equal = [made.intermediate_size // made.num_experts] * made.num_experts
        for expert, width in enumerate(equal if made.size_experts is None else made.size_experts[layer]):
            experts = f"{block}mlp.calculator.experts.weight_"
            shapes |= {f"{experts}{kind}.{expert}": (width, hidden) for kind in ("gate", "up")}
            shapes[f"{experts}down.{expert}"] = (hidden, width)
    torch.manual_seed(2)
    folder.mkdir(parents=True)
    weights = {n: torch.ones(s) if len(s) == 1 else 0.3 * torch.randn(s) for n, s in shapes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    values = {**made.to_dict(), "model_type": "llama_moe", "architectures": ["LlamaMoEForCausalLM"],
              "auto_map": {"AutoModelForCausalLM": "modeling_llama_moe.LlamaMoEForCausalLM"},
              "dtype": "float32"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def batch(seed: int, rows: int = 2) -> Tensor:
    """Random token ids ``[rows, LENGTH]``."""
    return torch.randint(1, VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def padding(rows: int = 2) -> Tensor:
    """Mask of a micro-batch whose first row is padded on the left."""
    mask = torch.ones(rows, LENGTH, dtype=torch.int64)
    mask[0, :5] = 0
    return mask


def batches(replica: int, *, padded: bool) -> Iterator[tuple[Any, Tensor]]:
    """Micro-batches without end; labels are the ids."""
    seed = 1000 * replica
    while True:
        ids, seed = batch(seed), seed + 1
        if not padded:
            yield ids, ids
            continue
        mask = padding()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        yield (ids, mask, positions), ids.masked_fill(mask == 0, -100)


def named(inputs: Any) -> dict[str, Tensor]:
    """The inputs of a micro-batch as a model of transformers takes them."""
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    return dict(zip(("input_ids", "attention_mask", "position_ids"), parts, strict=False))


def run_both(specs: list[Any], layers: list[Any], original: Any, *, padded: bool) -> None:
    """Run layers, and the model that they are the layers of, forward and backward: logits and loss have equal bits."""
    from dynpipe_ds.hf import causal_lm_loss

    inputs, labels = next(batches(3, padded=padded))
    expected = original(**named(inputs), labels=labels)
    output = run(specs, layers, inputs)
    loss = causal_lm_loss(output, labels)
    assert torch.equal(output[0] if isinstance(output, tuple) else output, expected.logits)
    assert torch.equal(loss, expected.loss)
    loss.backward()
    expected.loss.backward()


def run(specs: list[Any], layers: list[Any], inputs: Any) -> Any:
    """Pass inputs through built layers, as ``PipelineModule`` does."""
    for spec, layer in zip(specs, layers, strict=True):
        function = getattr(spec, "forward_fn", None)
        inputs = layer(inputs) if function is None else function(layer, inputs)
    return inputs


def build(specs: list[Any]) -> list[Any]:
    """Build layers and read their weights; tied ones are one."""
    layers: list[Any] = []
    tied: dict[str, Any] = {}
    for spec in specs:
        key = getattr(spec, "key", None)
        layer = tied[key] if key in tied else spec.build().to("cpu")
        if key is not None:
            tied[key] = layer
        layers.append(layer)
    return layers
