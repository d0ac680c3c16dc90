"""One life of a client: train, evaluate, save, train on; load the checkpoint in a fresh engine, train on again.

Led three times in one world: with DeepSpeed's module class, with ours in its place, and with ours while layers
move every few batches. Losses, evaluations and weights must be the same bits in all three.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from dynpipe_ds import DynamicPipelineModule
from tests.distributed.models import digest
from tests.distributed.ranks import run_ranks

SAVED_AFTER, BATCHES = 3, 6

Moves = dict[int, tuple[int, ...]]  # batch -> boundaries before it


def train_batch(engine: Any, batches: Iterator[Any]) -> Any:
    return engine.train_batch(batches)


def eval_batch(engine: Any, batches: Iterator[Any]) -> Any:
    return engine.eval_batch(batches)


def save_checkpoint(engine: Any, folder: str) -> None:
    engine.save_checkpoint(folder)


def load_checkpoint(engine: Any, folder: str) -> None:
    path, _ = engine.load_checkpoint(folder)
    assert path is not None


@dataclass(frozen=True)
class Client:
    """A script of a public project, reduced to what it asks of the library.

    Attributes:
        engine: builds model and engine on a given module class, as the script does.
        batches: micro-batches of a data-parallel replica.
        num_stages: S.
        moves: where the boundaries go in the third life.
        train: the script's way to train a batch; gives what it calls the loss.
        evaluate: its way to evaluate.
        save: its way to save to a folder.
        load: its way to load from there.
        micro_batches: of one batch.
        deepspeed_resumes: whether DeepSpeed goes on from a checkpoint as if nothing had happened; not with dropout,
            whose seeds count the micro-batches of the process.
        deepspeed_forgets: layers that DeepSpeed's checkpoints lack: tied ones that run by a ``forward_fn``.
        same_bits: whether DeepSpeed's bits are ours; else nearly, since it runs one backward an output of a stage.
    """

    engine: Callable[[type], Any]
    batches: Callable[[int], Iterator[Any]]
    num_stages: int
    moves: Moves
    train: Callable[[Any, Iterator[Any]], Any] = train_batch
    evaluate: Callable[[Any, Iterator[Any]], Any] = eval_batch
    save: Callable[[Any, str], Any] = save_checkpoint
    load: Callable[[Any, str], Any] = load_checkpoint
    micro_batches: int = 4
    deepspeed_resumes: bool = True
    deepspeed_forgets: tuple[int, ...] = ()
    same_bits: bool = True


@dataclass
class Life:
    """What can be seen of one on one rank."""

    losses: list[bytes] = field(default_factory=list)
    evaluated: list[bytes] = field(default_factory=list)
    weights: dict[int, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)  # with the optimizer's; of ours only
    resumed_losses: list[bytes] = field(default_factory=list)
    resumed_weights: dict[int, str] = field(default_factory=dict)
    finite: bool = True


def live(client: Client, base: type, moves: Moves, folder: str) -> Life:
    life, engine = Life(), client.engine(base)
    replica = engine.grid.get_data_parallel_id()
    batches = client.batches(replica)
    for batch in range(BATCHES):
        if batch == SAVED_AFTER:
            client.save(engine, folder)
        _one_batch(client, engine, batches, moves.get(batch), life.losses, life)
    life.evaluated.append(_bits(client.evaluate(engine, client.batches(9 + replica))))
    life.weights = weights_of(engine)
    if base is not PipelineModule:
        life.state = digest(engine)
    other = client.engine(base)
    client.load(other, folder)
    rest = islice(client.batches(replica), SAVED_AFTER * client.micro_batches, None)
    for batch in range(SAVED_AFTER, BATCHES):
        _one_batch(client, other, rest, moves.get(batch), life.resumed_losses, life)
    life.resumed_weights = weights_of(other)
    return life


def _one_batch(
    client: Client, engine: Any, batches: Iterator[Any], move: tuple[int, ...] | None, losses: list[bytes], life: Life
) -> None:
    if move is not None:
        engine.repartition(move)
    loss = client.train(engine, batches)
    life.finite &= all(bool(t.isfinite().all()) for t in _tensors(loss))
    losses.append(_bits(loss))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for item in value or () for t in _tensors(item)]


def _bits(value: Any) -> bytes:
    return b"".join(t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in _tensors(value))


def weights_of(engine: Any) -> dict[int, str]:
    """A hash of the weights and buffers of every layer on this rank, whichever class the module has."""
    start, found = engine.module._local_start, {}
    for i, function in enumerate(engine.module.forward_funcs):
        module = function.args[0] if isinstance(function, partial) and function.args else function
        if isinstance(module, nn.Module):
            h = hashlib.sha256()
            for name, tensor in sorted(module.state_dict().items()):
                h.update(name.encode() + _bits(tensor))
            found[start + i] = h.hexdigest()
    return found


def three_lives(_rank: int, clients: Sequence[Client], folder: str) -> list[list[Life]]:
    return [
        [live(client, base, moves, f"{folder}/{n}-{i}") for i, (base, moves) in enumerate(_ways(client))]
        for n, client in enumerate(clients)
    ]


def _ways(client: Client) -> list[tuple[type, Moves]]:
    return [(PipelineModule, {}), (DynamicPipelineModule, {}), (DynamicPipelineModule, client.moves)]


def compare(clients: Sequence[Client], folder: Any, replicas: int = 1) -> None:
    """Lead the three lives of some clients of as many stages, all in one world, and compare them.

    Args:
        clients: the clients.
        folder: for checkpoints.
        replicas: data-parallel replicas of each stage.
    """
    by_rank = run_ranks(three_lives, clients[0].num_stages * replicas, list(clients), str(folder))
    for n, client in enumerate(clients):
        _check(client, [rank[n] for rank in by_rank])


def _check(client: Client, ranks: list[list[Life]]) -> None:
    for lives in ranks:
        theirs, static, moved = lives
        assert all(life.finite for life in lives)
        assert len(set(theirs.losses)) == BATCHES, "the losses change from batch to batch"
        assert (moved.losses, moved.evaluated) == (static.losses, static.evaluated)
        if client.same_bits:
            assert (static.losses, static.evaluated) == (theirs.losses, theirs.evaluated)
        else:
            for bits, other in zip(static.losses + static.evaluated, theirs.losses + theirs.evaluated, strict=True):
                np.testing.assert_allclose(np.frombuffer(bits, "f4"), np.frombuffer(other, "f4"), rtol=1e-4)
        for life in lives[not client.deepspeed_resumes :]:
            assert life.resumed_losses == life.losses[SAVED_AFTER:]
    _check_weights(client, ranks)
    states = [_merged([rank[i] for rank in ranks], "state") for i in (1, 2)]
    assert states[0] == states[1] and states[0]


def _check_weights(client: Client, ranks: list[list[Life]]) -> None:
    expected = _merged([rank[1] for rank in ranks], "weights")
    for i, name in enumerate(("DeepSpeed's", "ours", "ours with moves")):
        if i == 0 and not client.same_bits:
            continue
        for what in ("weights", "resumed_weights"):
            of_deepspeed_resumed = i == 0 and what == "resumed_weights"
            if of_deepspeed_resumed and not client.deepspeed_resumes:
                continue
            found = _merged([rank[i] for rank in ranks], what)
            differing = {layer for layer in expected if found.get(layer) != expected[layer]}
            differing -= set(client.deepspeed_forgets if of_deepspeed_resumed else ())
            assert not differing and found.keys() == expected.keys(), f"{name}, {what}"


def _merged(lives: list[Life], what: str) -> dict[Any, Any]:
    return {key: value for life in lives for key, value in getattr(life, what).items()}
