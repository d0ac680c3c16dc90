"""A checkpoint seen with layers that are cut otherwise, in values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dynpipe_ds.checkpoint.manifest import LayerEntry, Manifest, OptimizerEntry, Slot, TensorForm
from dynpipe_ds.checkpoint.regroup import PresentLayer, regrouped

FORM = TensorForm("float32", (2,))
WHOLE = ("norm1.weight", "attention.qkv.weight", "attention.values", "norm2.weight", "mlp.up.weight")
FIRST, SECOND = WHOLE[:3], WHOLE[3:]
MODULES = {WHOLE: ("", "norm1", "attention", "attention.qkv", "norm2", "mlp", "mlp.up"),
           FIRST: ("", "norm1", "attention", "attention.qkv"), SECOND: ("", "norm2", "mlp", "mlp.up")}  # fmt: skip
ENDS = ("weight",)


def manifest(layers: Sequence[tuple[str, ...]], wholes: tuple[int, ...], partition: tuple[int, ...]) -> Manifest:
    entries = tuple(
        LayerEntry(f"L{i}", f"{i}.pt", dict.fromkeys(names, FORM), dict.fromkeys(names, True))
        for i, names in enumerate(layers)
    )
    slots = tuple(
        tuple(Slot(f"{i}/{name}", 0, f"n{i}") for i in range(a, b) for name in layers[i])
        for a, b in zip(partition, partition[1:], strict=False)
    )
    return Manifest("t", partition, 1, entries, OptimizerEntry("plain", "AdamW", 1), slots, ("m0", "m1"), (),
                    whole_layers=wholes)  # fmt: skip


def present(layers: Sequence[tuple[str, ...]], wholes: tuple[int, ...]) -> list[PresentLayer]:
    return [
        PresentLayer(f"P{i}", whole, frozenset(names), frozenset(MODULES.get(names, ("",))))
        for i, (names, whole) in enumerate(zip(layers, wholes, strict=True))
    ]


CUT, CUT_WHOLES = (ENDS, FIRST, SECOND, FIRST, SECOND, ENDS), (0, 1, 1, 2, 2, 3)
UNCUT, UNCUT_WHOLES = (ENDS, WHOLE, WHOLE, ENDS), (0, 1, 2, 3)


def read(file: str) -> dict[str, Any]:
    source = int(file.removesuffix(".pt"))
    return {name: (source, name) for name in (UNCUT if source < 4 else CUT)[source]}


def test_parts_take_their_tensors_from_the_whole() -> None:
    found = regrouped(manifest(UNCUT, UNCUT_WHOLES, (0, 2, 4)), present(CUT, CUT_WHOLES))
    assert [tuple(entry.tensors) for entry in found.manifest.layers] == list(CUT)
    assert [entry.name for entry in found.manifest.layers] == [f"P{i}" for i in range(6)]
    assert found.sources == ((0,), (1,), (1,), (2,), (2,), (3,))
    assert [slot.parameter for slot in found.manifest.slots[0]] == [
        "0/weight", *(f"1/{name}" for name in FIRST), *(f"2/{name}" for name in SECOND),
    ]  # fmt: skip
    assert found.weights(4, read) == {name: (2, name) for name in SECOND}


def test_the_whole_takes_the_tensors_of_its_parts() -> None:
    found = regrouped(manifest(CUT, CUT_WHOLES, (0, 2, 6)), present(UNCUT, UNCUT_WHOLES))
    assert [set(entry.tensors) for entry in found.manifest.layers] == [set(names) for names in UNCUT]
    assert found.sources == ((0,), (1, 2), (3, 4), (5,))
    assert found.manifest.slots[1][0].parameter == "1/norm2.weight", "on another stage than the first half"


def test_a_tensor_that_only_the_checkpoint_has_goes_where_its_module_is() -> None:
    """A pruned weight is kept under other names than a dense one."""
    layers = list(UNCUT)
    layers[1] = (*WHOLE, "attention.qkv.columns", "mlp.up.columns")
    found = regrouped(manifest(layers, UNCUT_WHOLES, (0, 2, 4)), present(CUT, CUT_WHOLES))
    assert "attention.qkv.columns" in found.manifest.layers[1].tensors
    assert "mlp.up.columns" in found.manifest.layers[2].tensors


def test_attributes_are_cut_and_joined_by_the_names_in_them() -> None:
    whole = {"": {"frozen": WHOLE, "sums": {name: i for i, name in enumerate(WHOLE)}, "seen": 7}, "mlp": {"load": 1}}
    found = regrouped(manifest(UNCUT, UNCUT_WHOLES, (0, 2, 4)), present(CUT, CUT_WHOLES))
    first, second = (found.attributes(i, {1: whole}) for i in (1, 2))
    assert first == {"": {"frozen": FIRST, "sums": {FIRST[0]: 0, FIRST[1]: 1, FIRST[2]: 2}, "seen": 7}}
    assert second == {"": {"frozen": SECOND, "sums": {SECOND[0]: 3, SECOND[1]: 4}, "seen": 7}, "mlp": {"load": 1}}
    back = regrouped(manifest(CUT, CUT_WHOLES, (0, 2, 6)), present(UNCUT, UNCUT_WHOLES))
    assert back.attributes(1, {1: first, 2: second}) == whole


def test_what_replicas_own_goes_where_its_module_is() -> None:
    owned = {"mlp.up.weight": ("r0", "r1")}
    whole = manifest(UNCUT, UNCUT_WHOLES, (0, 2, 4))
    layers = tuple(replace(entry, owned=owned if i in (1, 2) else {}) for i, entry in enumerate(whole.layers))
    found = regrouped(replace(whole, layers=layers), present(CUT, CUT_WHOLES)).manifest
    assert [entry.owned for entry in found.layers] == [{}, {}, owned, {}, owned, {}]
    assert found.owned_keys == {"2/mlp.up.weight", "4/mlp.up.weight"}
    cut = manifest(CUT, CUT_WHOLES, (0, 2, 6))
    layers = tuple(replace(entry, owned=owned if i in (2, 4) else {}) for i, entry in enumerate(cut.layers))
    back = regrouped(replace(cut, layers=layers), present(UNCUT, UNCUT_WHOLES)).manifest
    assert [entry.owned for entry in back.layers] == [{}, owned, owned, {}]
