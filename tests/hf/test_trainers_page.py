"""docs/trainers.md: its two scripts, run on the same model and text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'dynpipe_ds[hf]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: the Trainer needs it")

from tests.distributed.ranks import run_ranks  # noqa: E402
from tests.docs import pages  # noqa: E402
from tests.hf import tiny  # noqa: E402

BEFORE, AFTER = (block.code for block in pages.blocks("docs/trainers.md", "python"))


@dataclass
class Seen:
    """What one rank saw."""

    trainer: list[float]
    ours: list[float]


def run(script: str, *arguments: str) -> list[float]:
    space: dict[str, Any] = {"__name__": "page"}
    exec(compile(script, "train.py", "exec"), space)
    losses: list[float] = space["main"](*arguments)
    return losses


def run_scripts(rank: int, root: str) -> Seen:
    """The pipeline on both ranks, then the Trainer on the first, as in a process of its own."""
    model, text = f"{root}/bytes", f"{root}/text.txt"
    ours = run(AFTER, model, text, f"{root}/piped")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return Seen(alone(model, text, f"{root}/trained") if rank == 0 else [], ours)


def alone(model: str, text: str, out: str) -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
            patch.delenv(name, raising=False)
        return run(BEFORE, model, text, out)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 without dropout, and lines of one length, so that both scripts weigh tokens alike."""
    root = tmp_path_factory.mktemp("trainers")
    tiny.write_with_bytes(root / "bytes", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)
    (root / "text.txt").write_text("\n".join(f"{n} and {n} is {2 * n:3}" for n in range(10, 90)))
    return root


def test_both_scripts_learn_alike(root: Path) -> None:
    """The losses of all batches, and the weights that each script saves.

    The Trainer divides by the number of labels, of which the first of a line predicts nothing.
    """
    import transformers

    first, second = run_ranks(run_scripts, 2, str(root), timeout_s=240)
    assert first.ours == second.ours and len(set(first.ours)) == 10
    labels = len(transformers.AutoTokenizer.from_pretrained(root / "bytes")("10 and 10 is  20")["input_ids"])
    assert first.trainer == pytest.approx([loss * (labels - 1) / labels for loss in first.ours], abs=1e-3)
    assert first.ours[-1] < first.ours[0]
    trained, piped = (
        transformers.AutoModelForCausalLM.from_pretrained(root / folder).state_dict() for folder in ("trained", "piped")
    )
    assert trained.keys() == piped.keys()
    for name, weight in trained.items():
        torch.testing.assert_close(piped[name], weight, atol=5e-4, rtol=0)
    assert (root / "piped" / "tokenizer_config.json").is_file()
