"""The layers that a causal language model of ``transformers`` is cut into.

The blocks are those of ``transformers``; around them stands only what its model's forward does between
them. Everything a layer needs comes in by the activation, so a stage boundary may fall between any two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dynpipe_ds.hf.adapters import Adapters, is_adapter, saved_parameters, stored_name
from dynpipe_ds.hf.carry import Activation, Carry, Layout
from dynpipe_ds.hf.experts import MakeExperts
from dynpipe_ds.hf.families import Family, initialise
from dynpipe_ds.hf.folder import PretrainedFolder
from dynpipe_ds.hf.pieces import Piece, Source, rows_of
from dynpipe_ds.hf.routing import take_expert_load, watched
from dynpipe_ds.owning import inherit


class PretrainedLayer(nn.Module):
    """A layer that knows where its weights stand in a model folder.

    With a folder it is built without memory and reads its weights when it is first moved to a device, which
    ``PipelineModule`` does at the end of its construction to the layers of its own stage only: counting the
    parameters of all layers costs neither memory nor reading.

    Args:
        family: the kind of model.
        layout: what an activation consists of.
        folder: where the weights are; ``None`` for random ones.
        dtype: of the parameters.
        adapters: that are trained in place of the weights; ``None`` for none.

    Attributes:
        family: as given.
        layout: as given.
        adapters: as given.
        stored_as: name in the model by attribute, of every part with weights.
    """

    def __init__(
        self, family: Family, layout: Layout, folder: PretrainedFolder | None, dtype: torch.dtype = torch.float32,
        adapters: Adapters | None = None,
    ) -> None:
        super().__init__()
        self.family = family
        self.layout = layout
        self.adapters = adapters
        self.stored_as: dict[str, str] = {}
        self._folder = folder
        self._dtype = dtype

    def add_part(self, attribute: str, part: nn.Module, stored_as: str) -> None:
        """Add a part with weights; random ones are made here.

        Args:
            attribute: what it is called in this layer.
            part: the part.
            stored_as: what it is called in the model.
        """
        if self._folder is None:
            initialise(self.family, part)
        if self.adapters is not None:
            part = self.adapters.add_to(part, stored_as)
        if self._folder is None:
            part.to(self._dtype)
        self.add_module(attribute, part)
        self.stored_as[attribute] = stored_as
        if self._folder is None and self.adapters is not None:
            self.adapters.fill({stored_as: part})

    def adapter_pieces(self) -> dict[str, Tensor]:
        """What ``peft`` saves of the layer, by its names in files of ``peft``."""
        return {stored_name(name): parameter.detach() for name, parameter in saved_parameters(self._parts()).items()}

    def pieces(self) -> Iterator[Piece]:
        """The layer's weights as model folders store them; adapters are not among them."""
        for full, parameter in self._named().items():
            rows = rows_of(parameter)
            for stored, part in self.family.pieces(full, parameter.detach(), 0 if rows is None else rows.start):
                yield Piece(full, stored, part, rows)

    def _named(self) -> dict[str, nn.Parameter]:
        return {
            f"{stored_as}.{name}".replace(".base_layer.", "."): parameter
            for stored_as, part in self._parts().items()
            for name, parameter in part.named_parameters() if not is_adapter(name)
        }  # fmt: skip

    def _parts(self) -> dict[str, nn.Module]:
        return {stored_as: self.get_submodule(attribute) for attribute, stored_as in self.stored_as.items()}

    def sources(self, folder: PretrainedFolder) -> dict[str, Source]:
        """Find the layer's weights in a folder.

        Returns:
            Where a weight goes, by the name in the folder.

        Raises:
            ValueError: if one is missing.
        """
        found: dict[str, Source] = {}
        whole = self._named()
        for piece in self.pieces():
            name = folder.find(_names(piece.stored, self.family))
            fused = folder.find(_names(piece.full, self.family)) if name is None else None
            if name is not None and not piece.is_whole:
                found[name] = Source(piece.part)
            elif name is not None or fused is not None:
                found[name or fused or ""] = Source(whole[piece.full].detach(), piece.rows)
            else:
                raise ValueError(
                    f"{folder.path} holds no weight {piece.stored}: it is not a {type(self.family).__name__} for "
                    "causal language modelling, or incomplete"
                )
        return found

    def num_bytes(self) -> int:
        """Memory that the weights take in this layer's type, whether they are read or not."""
        return sum(p.numel() for p in self.parameters()) * self._dtype.itemsize

    def load(self) -> None:
        """Take memory and read the weights, if that is still to be done."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        for module in self.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    data = torch.empty(parameter.shape, dtype=self._dtype, device="cpu")
                    module._parameters[name] = new = nn.Parameter(data, requires_grad=parameter.requires_grad)
                    inherit(parameter, new)
        sources = self.sources(folder)
        rows = {name: source.rows for name, source in sources.items() if source.rows is not None}
        folder.read_into({name: source.target for name, source in sources.items()}, rows)
        if self.adapters is not None:
            self.adapters.fill(self._parts())

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self.load()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


def _names(name: str, family: Family) -> tuple[str, ...]:
    """Names a weight may have in files: with or without the base model's prefix; tied ones by either end."""
    names = (name, name.removeprefix(f"{family.base_class().base_model_prefix}."))
    return (*names, f"{family.head}.weight") if family.tied and name == f"{family.embedding}.weight" else names


class TokenEmbedding(PretrainedLayer):
    """Token embedding, and the head of a tied model."""

    embed: nn.Embedding

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.add_part("embed", self.family.make_embedding(), self.family.embedding)

    def forward(self, inputs: Activation) -> Activation:
        """Map token ids ``[batch, seq]`` to the stream ``[batch, seq, hidden]``."""
        carry = self.layout.begin(inputs)
        carry.stream = self.embed(carry.stream)
        return self.layout.pack(carry)


class PositionEmbedding(PretrainedLayer):
    """Learned positions, added to the stream, and the dropout behind (GPT-2)."""

    embed: nn.Embedding

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        config = self.family.config
        assert self.family.positions is not None
        self.add_part("embed", nn.Embedding(config.max_position_embeddings, config.hidden_size), self.family.positions)
        self.dropout = nn.Dropout(config.embd_pdrop)

    def forward(self, activation: Activation) -> Activation:
        """Map the stream ``[batch, seq, hidden]`` to the same shape."""
        carry = self.layout.unpack(activation)
        carry.stream = self.dropout(carry.stream + self.embed(carry.position_ids()))
        return self.layout.pack(carry)


class Block(PretrainedLayer):
    """A block of the model.

    Args:
        *args: those of :class:`PretrainedLayer`.
        index: which one.
        experts: computes the block's experts in its place, if given.

    Attributes:
        index: as given.
        part: which of :attr:`part_names` it is, if it is not the whole block (:func:`~dynpipe_ds.split_layers`).
    """

    part_names: ClassVar[tuple[str, ...]] = ("attention", "mlp")
    block: nn.Module

    def __init__(self, *args: Any, index: int, experts: MakeExperts | None = None) -> None:
        super().__init__(*args)
        self.index = index
        self.add_part("block", self.family.make_block(index), f"{self.family.blocks}.{index}")
        if experts is not None:
            self.family.replace_experts(self.block, experts)
        self.part: str | None = None
        with torch.device("cpu"):  # its buffers are made, not read
            self.rotary = self.family.make_rotary()

    def keep_part(self, part: str) -> None:
        """Let go of the other half.

        Args:
            part: one of :attr:`part_names`.
        """
        self.part = part
        self.family.keep_half(self.block, part)
        if part != "attention":
            self.rotary = None

    def forward(self, activation: Activation) -> Activation:
        """Map the stream ``[batch, seq, hidden]`` to the same shape; note what a router does."""
        carry = self.layout.unpack(activation)
        attending = {} if self.part == "mlp" else self._attending(carry)
        with watched(self.family.router(self.block)) as routed:
            if self.part is None:
                stream = self.block(carry.stream, **attending)
            else:
                stream = self.family.run_half(self.block, self.part, carry.stream, **attending)
        for output in routed:
            self.family.route(self.block, output, carry)
        carry.stream = stream
        return self.layout.pack(carry)

    def drop_gradients(self) -> None:
        """Forget what was counted in a batch that all ranks drop."""
        take_expert_load(self)

    def _attending(self, carry: Carry) -> dict[str, Any]:
        family, index = self.family, self.index
        angles = {} if self.rotary is None else {"position_embeddings": family.angles(self.rotary, carry, index)}
        return {"attention_mask": family.mask(carry, index), "position_ids": carry.position_ids(), **angles}

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # As from_pretrained: angles stay float32 whatever the weights are.
        exact = {} if self.rotary is None else dict(self.rotary.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            self.rotary._buffers[name] = buffer.to(self.rotary._buffers[name].device)  # type: ignore[union-attr]
        return self


class FinalNorm(PretrainedLayer):
    """The norm before the head of a tied model (:class:`Head` has its own)."""

    norm: nn.Module

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.add_part("norm", self.family.make_norm(), self.family.norm)

    def forward(self, activation: Activation) -> Activation:
        """Normalise the stream ``[batch, seq, hidden]``."""
        carry = self.layout.unpack(activation)
        carry.stream = self.norm(carry.stream)
        return self.layout.pack(carry)


class Head(FinalNorm):
    """Final norm and projection to logits of an untied model."""

    project: nn.Linear

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        config = self.family.config
        self.add_part("project", nn.Linear(config.hidden_size, config.vocab_size, bias=False), self.family.head)

    def forward(self, activation: Activation) -> Activation:
        """Map the stream to logits ``[batch, seq, vocab]``, or to a pair of them and the routers' loss."""
        carry = self.layout.unpack(activation)
        return _finish(self, carry, self.project(self.norm(carry.stream)))


def project_with_embedding(embedding: TokenEmbedding, activation: Activation) -> Activation:
    """Use the embedding's weight as the head's (tied models)."""
    carry = embedding.layout.unpack(activation)
    return _finish(embedding, carry, F.linear(carry.stream, embedding.embed.weight))


def _finish(layer: PretrainedLayer, carry: Carry, logits: Tensor) -> Activation:
    logits = layer.family.finish_logits(logits)
    return logits if layer.layout.routing is None else (logits, layer.family.extra_loss(carry))
