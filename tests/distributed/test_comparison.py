"""One warning at start about what keeps losses from being comparable, and none where nothing does."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.pipe import LayerSpec
from torch import nn

from dynpipe_ds import DynamicPipelineModule
from tests.distributed.configs import CLIP, UNCLIPPED, ZERO
from tests.distributed.models import Block, Embed, Head, Run, base_config, loss_fn
from tests.distributed.ranks import run_ranks
from tests.matrix import mostly


def told(rank: int, run: Run, seed_layers: bool) -> list[str]:
    """Start; give back what was warned about. The one layer with dropout is the last stage's."""
    torch.manual_seed(7)
    layers = [LayerSpec(Embed), LayerSpec(Block), LayerSpec(Block, 16, run.dropout), LayerSpec(Head)]
    module = DynamicPipelineModule(
        layers, num_stages=run.num_stages, loss_fn=loss_fn, seed_layers=seed_layers, partition_method="uniform"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        deepspeed.initialize(model=module, config=base_config(run, 1))
    return [str(w.message) for w in caught if "losses of this run may differ" in str(w.message)]


DROPS = Run(2, dropout=0.1, config=UNCLIPPED)


CASES: dict[str, tuple[Run, bool, list[str]]] = {
    "dropout": (DROPS, False, ["layer 2.dropout (Dropout) uses dropout"]),
    "seeded": (DROPS, True, []),
    "clipped": (replace(DROPS, config=CLIP), False, ["uses dropout", "counts the first stage only"]),
    "zero1": (replace(DROPS, config={**CLIP, **ZERO}), True, ["by a norm that is the same for every cut"]),
    "without": (replace(DROPS, dropout=0.0), False, []),
    "one_stage": (replace(DROPS, config=CLIP, num_stages=1), True, []),
}


@pytest.mark.parametrize("case", mostly(CASES, ["seeded", "clipped"]))
def test_one_warning_on_the_first_rank(case: str) -> None:
    run, seed_layers, words = CASES[case]
    first, *others = run_ranks(told, run.num_stages, run, seed_layers)
    assert not any(others)
    assert len(first) == bool(words)
    for word in words:
        assert word in first[0]


def drops(**attributes: Any) -> bool:
    from dynpipe_ds.host.differences import dropout_rates

    module = nn.Module()
    vars(module).update(attributes)
    return bool(dropout_rates(module))


def test_what_counts_as_dropout() -> None:
    from dynpipe_ds.host.differences import dropout_rates

    assert drops(attention_dropout=0.1) and drops(dropout=0.5)
    assert not drops(attention_dropout=0.0) and not drops(dropout=nn.Dropout) and not drops(p=0.5)
    assert dropout_rates(nn.Dropout2d(0.2)) and not dropout_rates(nn.Dropout(0.0))
    assert dropout_rates(nn.MultiheadAttention(4, 2, dropout=0.1)) and dropout_rates(nn.LSTM(2, 2, 2, dropout=0.1))
