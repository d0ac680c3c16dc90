"""A causal language model of ``transformers`` as a list of pipeline layers, and its loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynpipe_ds.hf.adapters import Adapters, refuse_tied, skeleton_of
from dynpipe_ds.hf.carry import Activation, Layout
from dynpipe_ds.hf.experts import ExpertStacks
from dynpipe_ds.hf.families import Family
from dynpipe_ds.hf.folder import PretrainedFolder
from dynpipe_ds.hf.known import family_of
from dynpipe_ds.hf.layers import (
    Block,
    FinalNorm,
    Head,
    PositionEmbedding,
    PretrainedLayer,
    TokenEmbedding,
    project_with_embedding,
)  # fmt: skip
from dynpipe_ds.host.parts import split_layers
from dynpipe_ds.host.specs import LayerSpec, TiedLayerSpec

IGNORED_LABEL = -100


class _Spec(LayerSpec):  # type: ignore[misc]
    def build(self, log: bool = False) -> PretrainedLayer:
        """Build a layer, without memory if its weights will be read."""
        folder = self.module_args[2]
        with torch.device("cpu" if folder is None else "meta"):
            return super().build(log)  # type: ignore[no-any-return]


class _TiedSpec(_Spec, TiedLayerSpec):  # type: ignore[misc]
    pass


def causal_lm_layers(
    model: str | Path | PretrainedFolder | Any,
    *,
    dtype: torch.dtype = torch.float32,
    attention_mask: bool = False,
    position_ids: bool = False,
    router_loss_weight: float | None = None,
    split_blocks: bool = False,
    experts: Callable[[ExpertStacks], nn.Module] | None = None,
    adapter: Any = None,
) -> list[LayerSpec]:
    """List the layers of a causal language model, for ``DynamicPipelineModule``.

    Args:
        model: a local model folder, whose weights are read stage by stage; or a ``PreTrainedConfig`` for
            random weights. GPT-2, Llama, Qwen2, Qwen3, Gemma 2, Gemma 3, Mixtral, LLaMA-MoE.
        dtype: of the parameters. float32 unless DeepSpeed is to train pure low precision: with ``"bf16"`` in
            its configuration it casts them and keeps these as master weights.
        attention_mask: whether inputs are ``(token ids, attention_mask)``; 0 marks padding.
        position_ids: whether position ids, int64 ``[batch, seq]``, are the last of the inputs.
        router_loss_weight: weight of the routers' load-balancing loss, 0 for none; ``None`` for what the
            configuration says (``output_router_logits`` and ``router_aux_loss_coef`` of Mixtral,
            ``gate_use_balance`` and ``gate_balance_loss_weight`` of LLaMA-MoE).
        split_blocks: whether attention and MLP of a block are two layers.
        experts: makes a module that computes the experts of a block in its place, and may keep one replica's rows of
            them (:func:`~dynpipe_ds.own_by_replica`); called where a block is built. See docs/huggingface.md.
        adapter: a ``peft.LoraConfig``: the model's own weights are frozen, and new adapters are trained. Or a folder
            that ``save_pretrained`` of ``peft`` or of this package wrote: its adapters are trained further.

    Returns:
        Token embedding, for GPT-2 position embedding, blocks, head (in a tied model the norm before it is a layer
        of its own). Inputs are token ids ``[batch, seq]`` or a tuple; the last layer gives logits
        ``[batch, seq, vocab]``, or a pair of them and the routers' weighted loss.

    Raises:
        ValueError: the same on every rank that sees the same folder, if the kind of model is not known, a weight is
            missing or has another shape, or an adapter does not fit.
        ImportError: if ``adapter`` is given and ``peft`` is not installed.
    """
    folder = PretrainedFolder(model) if isinstance(model, str | Path) else model
    config = folder.config if isinstance(folder, PretrainedFolder) else folder
    if isinstance(config, nn.Module):
        raise ValueError(_refused(config))
    if not isinstance(folder, PretrainedFolder):
        folder = None
    if router_loss_weight is not None and not 0 <= router_loss_weight < math.inf:
        raise ValueError(f"router_loss_weight={router_loss_weight} must be 0 or more, or None for the model's own")
    family = family_of(config)
    layout = Layout(padding=attention_mask, positions=position_ids, routing=family.routing_shape(router_loss_weight))
    adapters = None
    if adapter is not None:
        with torch.random.fork_rng(devices=[]):
            adapters = Adapters(adapter, _skeleton(family, _list_layers(family, (family, layout, None, dtype), {})))
        refuse_tied(adapters.targets, (family.embedding, family.head) if family.tied else ())
    others = {} if experts is None else {"experts": experts}
    layers = _list_layers(family, (family, layout, folder, dtype, adapters), others)
    if folder is not None:
        _check(layers, folder)
    return split_layers(layers) if split_blocks else layers


def _refused(model: Any) -> str:
    """Why a live model is not cut."""
    name = type(model).__name__
    remedy = "save it with save_pretrained and give that folder, whose weights each stage reads for itself"
    if hasattr(model, "peft_config"):
        remedy = (
            "give the folder of the model below, and adapter=model.peft_config['default'] for new adapters; or save "
            "these with save_pretrained and give adapter=that folder"
        )
    return f"causal_lm_layers takes a model folder or a configuration, not a live {name}: {remedy}"


def _list_layers(family: Family, args: tuple[Any, ...], of_blocks: dict[str, Any]) -> list[LayerSpec]:
    tied = partial(_TiedSpec, "embedding", TokenEmbedding, *args, tied_weight_attr="embed.weight")
    head = [_Spec(FinalNorm, *args), tied(forward_fn=project_with_embedding)] if family.tied else [_Spec(Head, *args)]
    return [
        tied() if family.tied else _Spec(TokenEmbedding, *args),
        *([] if family.positions is None else [_Spec(PositionEmbedding, *args)]),
        *(_Spec(Block, *args, index=index, **of_blocks) for index in range(family.depth)),
        *head,
    ]


def _skeleton(family: Family, layers: list[LayerSpec]) -> nn.Module:
    """The whole model without memory, named and known as that of ``transformers``."""
    parts: dict[str, nn.Module] = {}
    with torch.device("meta"):
        for spec in layers:
            layer = spec.typename(*spec.module_args, **spec.module_kwargs)
            parts |= {stored_as: layer.get_submodule(attribute) for attribute, stored_as in layer.stored_as.items()}
        if family.tied:
            parts[family.head] = nn.Linear(family.config.hidden_size, family.config.vocab_size, bias=False)
    root: Any = skeleton_of(parts, family.base_class()(family.config))
    root.get_output_embeddings = partial(parts.get, family.head)  # left out of all linear layers
    return root  # type: ignore[no-any-return]


def _check(layers: list[LayerSpec], folder: PretrainedFolder) -> None:
    """Compare names and shapes of all weights with the folder's, without reading one."""
    expected = {
        name: tuple(source.target.shape) for spec in layers for name, source in spec.build().sources(folder).items()
    }
    found = folder.shapes(expected)
    for name, shape in expected.items():
        if found[name] != shape:
            raise ValueError(
                f"{name} in {folder.path} has shape {list(found[name])}, but its config.json asks for {list(shape)}: "
                "they belong to different models"
            )


def causal_lm_loss(output: Activation, labels: Tensor) -> Tensor:
    """Loss as ``transformers`` computes it, plus the routers' loss if there is one.

    Args:
        output: logits ``[batch, seq, vocab]``, or a pair of them and a scalar.
        labels: the token ids themselves, ``[batch, seq]`` (they are shifted here); -100 where none counts.

    Returns:
        Mean cross entropy in nats a token, a float32 scalar.
    """
    logits, extra_loss = (output, 0.0) if isinstance(output, Tensor) else output
    following = F.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:].contiguous()
    logits = logits.float().view(-1, logits.shape[-1])
    return F.cross_entropy(logits, following.view(-1), ignore_index=IGNORED_LABEL) + extra_loss
