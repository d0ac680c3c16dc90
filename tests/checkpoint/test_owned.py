"""Rows of a whole, cut anew: in values, without a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dynpipe_ds.checkpoint.manifest import CheckpointError, LayerEntry, Manifest, OptimizerEntry, TensorForm
from dynpipe_ds.checkpoint.owned import Rows, whole_form
from dynpipe_ds.host.optimizers.flat import Pieces
from dynpipe_ds.owning import Replica

WHOLE = torch.arange(24.0).view(12, 2)
OWNED = {0: ("table",)}


def manifest(count: int, kind: str) -> Manifest:
    """Of a layer of which so many replicas own rows; of 0 replicas: all have the whole."""
    files = {"table": tuple(f"r{i}" for i in range(count))} if count else {}
    form = TensorForm("float32", (12 // max(1, count), 2))
    entry = LayerEntry("Table", "0.pt", {"table": form, "bias": form}, {"table": True}, files)
    return Manifest("t", (0, 1), max(1, count), (entry,), OptimizerEntry(kind, "AdamW", 1), ((),), ("m",), ())


def files(count: int, kind: str, **more: Any) -> Any:
    """Reads the file of a replica: moments are the weights times ten, flat ones in a row."""

    def read(file: str) -> Any:
        rows = Replica(int(file[1:]), count).rows(12)
        part = WHOLE[rows.start : rows.stop]
        moment = (part * 10).flatten() if kind == "flat" else part * 10
        state = {"exp_avg": moment, "step": torch.tensor(3.0), **more}
        return {"weights": {"table": part}, "optimizer": {"table": state}}

    return read


def content(value: Any) -> Tensor:
    return torch.cat(value.tensors) if isinstance(value, Pieces) else value.flatten()


@pytest.mark.parametrize("kind", ["plain", "flat"])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (1, 3), (3, 1), (2, 3), (3, 2), (4, 6), (0, 2), (2, 0)])
def test_every_replica_gets_its_rows_of_weights_and_state(kind: str, before: int, after: int) -> None:
    stored = {"table": WHOLE[: 12 // max(1, before)], "bias": torch.ones(2)}
    whole = Pieces((WHOLE.flatten() * 10,)) if kind == "flat" else WHOLE * 10
    states = {} if before else {"table": {"exp_avg": whole, "step": torch.tensor(3.0)}, "bias": {}}
    for index in range(max(1, after)):
        replica = Replica(index, max(1, after))
        rows = Rows(manifest(before, kind), OWNED if after else {}, replica, files(before, kind))
        mine = WHOLE[replica.rows(12).start : replica.rows(12).stop]
        weights = rows.weights(0, stored)
        assert torch.equal(weights["table"], mine) and weights["bias"] is stored["bias"]
        state = rows.states(0, stored, states)["table"]
        assert torch.equal(content(state["exp_avg"]), mine.flatten() * 10)
        assert isinstance(state["exp_avg"], Pieces) == (kind == "flat") and float(state["step"]) == 3


def test_only_the_replicas_own_file_is_read_where_there_are_as_many() -> None:
    seen: list[str] = []
    rows = Rows(manifest(3, "plain"), OWNED, Replica(1, 3), lambda file: seen.append(file) or files(3, "plain")(file))
    rows.weights(0, {"table": WHOLE[:4]})
    rows.states(0, {"table": WHOLE[:4]}, {})
    assert set(seen) == {"r1"}


def test_state_that_can_not_be_cut_is_refused() -> None:
    factored = {"row": torch.ones(6)}
    as_it_is = Rows(manifest(2, "plain"), OWNED, Replica(1, 2), files(2, "plain", **factored))
    assert as_it_is.states(0, {"table": WHOLE[:6]}, {})["table"]["row"].shape == (6,)
    cut = Rows(manifest(2, "plain"), OWNED, Replica(1, 3), files(2, "plain", **factored))
    with pytest.raises(CheckpointError, match=r"table of layer 0 \(Table\).* 'row' has 6 elements .* can't be cut by"):
        cut.states(0, {"table": WHOLE[:6]}, {})


def test_the_form_of_the_whole() -> None:
    form = TensorForm("float32", (3, 2))
    assert whole_form(form, "table", OWNED[0], 4).shape == (12, 2)
    assert whole_form(form, "bias", OWNED[0], 4) == form
