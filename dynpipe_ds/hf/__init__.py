"""Causal language models of ``transformers`` as pipeline layers; needs the extra ``dynpipe_ds[hf]``.

``causal_lm_layers`` lists the layers, ``PretrainedFolder`` reads a local model folder stage by stage,
``save_pretrained`` writes one that ``transformers`` loads again.
"""

from __future__ import annotations

from dynpipe_ds.hf.extra import check_extra

check_extra()

from dynpipe_ds.hf.causal_lm import causal_lm_layers, causal_lm_loss  # noqa: E402
from dynpipe_ds.hf.experts import ExpertStacks  # noqa: E402
from dynpipe_ds.hf.folder import PretrainedFolder  # noqa: E402
from dynpipe_ds.hf.layers import PretrainedLayer  # noqa: E402
from dynpipe_ds.hf.routing import take_expert_load  # noqa: E402
from dynpipe_ds.hf.save import save_pretrained  # noqa: E402

__all__ = [
    "ExpertStacks",
    "PretrainedFolder",
    "PretrainedLayer",
    "causal_lm_layers",
    "causal_lm_loss",
    "save_pretrained",
    "take_expert_load",
]
