"""Whether what a moved layer is bound to says the same on both ranks.

A layer is bound to the receiver's own objects. If training changed one of them on one rank only (a counter that layers
advance), the layer finds another value where it arrives; that is told, by path. What differed from the start (a rank's
number, a device) is the script's own business. Tensors have to be the same in any case.
"""

from __future__ import annotations

import hashlib
import types
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

from dynpipe_ds.migration.decoding import DecodingError
from dynpipe_ds.migration.names import Names, Values
from dynpipe_ds.migration.references import ATOMS, Path, children, is_a, spell

MOST_VALUES = 500
"""Plain values that are compared of one object; of larger ones the first."""
_LONGEST = 60


def values_of(obj: Any, is_whole: bool) -> Values:
    """The plain values and tensors in an object, as text, by path.

    Args:
        obj: what a layer is bound to.
        is_whole: whether the modules in it count with their tensors: layers compute with a module that they share, but
            only hold a reference to the model that they are part of.
    """
    counted = _tensors_of(obj) if is_whole or is_a(obj, Tensor) else {}
    found = {name: _text_of_tensor(tensor) for name, tensor in counted.items()}
    if is_a(obj, Tensor):
        return found
    queue: deque[tuple[Path, Any]] = deque([(("",), obj)])
    seen = {id(obj)}
    while queue and len(found) < MOST_VALUES:
        path, holder = queue.popleft()
        for step, value in children(holder):
            here = (*path, step)
            if type(value) in ATOMS:
                found[_step_text(here)] = _text(value)
            elif is_a(value, (dict, list, tuple)) or not is_a(value, _NOT_ENTERED) and not callable(value):
                if id(value) not in seen and not (is_a(holder, nn.Module) and step[1] in _TABLES):
                    seen.add(id(value))
                    queue.append((here, value))
    return found


def _tensors_of(obj: Any) -> dict[str, Tensor]:
    """A tensor, or those of a module, by the path from there."""
    if is_a(obj, nn.Module):
        return {f".{name}": tensor for name, tensor in (*obj.named_parameters(), *obj.named_buffers())}
    return {"": obj} if is_a(obj, Tensor) else {}


_TABLES = frozenset(vars(nn.Module()))
_NOT_ENTERED = (nn.Module, Tensor, type, types.ModuleType)


def _step_text(path: Path) -> str:
    text = spell(path)
    return text if text.startswith("[") else f".{text}"


def _text(value: Any) -> str:
    text = repr(value)
    if len(text) <= _LONGEST:
        return text
    return f"{text[:20]}... ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"


def _text_of_tensor(tensor: Tensor) -> str:
    data = Tensor.detach(tensor)
    if data.is_meta:
        return "without data"
    name = str(data.dtype).removeprefix("torch.")
    if data.layout != torch.strided:
        data = data.to_dense()
    bits = data.cpu().contiguous().view(-1).view(torch.uint8) if data.numel() else data.new_zeros(0, dtype=torch.uint8)
    digest = hashlib.blake2b(bits.numpy().tobytes(), digest_size=8).hexdigest()
    return f"{name} {list(data.shape)} with bits {digest}"


def _adapt(obj: Any, theirs: Values, device: torch.device | None) -> None:
    """Bring tensors that only layers elsewhere used so far to where and into what the engine brings a layer's."""
    for name, tensor in _tensors_of(obj).items():
        dtype = getattr(torch, theirs.get(name, "").partition(" ")[0], None)
        if isinstance(dtype, torch.dtype) and not tensor.is_meta:
            tensor.data = tensor.data.to(device=device, dtype=dtype)


def compare(
    path: Path, mine: Any, theirs: tuple[Values, list[str]], names: Names, device: torch.device | None
) -> list[str]:
    """What a bound object says here and elsewhere.

    Args:
        path: of the object.
        mine: this rank's.
        theirs: its values on the rank that the layer comes from, and which of them changed since the start.
        names: of this rank.
        device: of this stage.

    Returns:
        Differences that training made, one sentence each.

    Raises:
        DecodingError: if tensors differ.
    """
    values, changed = theirs
    is_shared = path in names.shared.values()
    if is_shared:
        _adapt(mine, values, device)
    here = values_of(mine, is_shared)
    moved = {*changed, *names.changed(path, here)}
    problems = []
    for name in values.keys() & here.keys():
        if values[name] == here[name]:
            continue
        if " with bits " in values[name]:
            raise DecodingError(
                f"{spell(path)}{name} is shared by layers and is another tensor here ({here[name]}) than on the stage "
                f"the layer comes from ({values[name]}); give it equal values on every rank, or every layer its own"
            )
        if name in moved:
            problems.append(
                f"{spell(path)}{name}, which the layer refers to, is {here[name]} here and {values[name]} on the stage "
                "it comes from; keep what layers change in the layer itself, or change it on every rank"
            )
    return problems
