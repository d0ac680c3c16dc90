"""Predicted against measured seconds of one MoE layer, as in Pro-Prophet's Figure 13."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

from benchmarks.experts.drawn import calibrated, routed, sample_of
from benchmarks.experts.replayed import CONTENDERS
from benchmarks.experts.settings import Setting
from benchmarks.experts.waiting import BACKWARD, Sizes, Waiting
from benchmarks.ranks import Send, on_ranks
from benchmarks.record import table
from scenarios.moe.measuring import renewed
from scenarios.moe.placing import Constants, LayerModel, plan

PARTS = ("all-to-all", "experts", "Trans", "Agg", "whole layer")
GOAL = 0.05
"""Mean error; the paper's, of all but the whole layer (section VI-C, Figure 13)."""


@dataclass(frozen=True)
class Row:
    """One placement of one draw.

    Args:
        top_k: experts a token.
        draw: which.
        placement: its planner.
        predicted_s: by part.
        measured_s: by part, medians; 0 where nothing travelled.
    """

    top_k: int
    draw: int
    placement: str
    predicted_s: dict[str, float]
    measured_s: dict[str, float]

    def error(self, part: str) -> float | None:
        """Error of a part over what was measured; ``None`` where there is nothing to predict."""
        predicted, measured = self.predicted_s[part], self.measured_s[part]
        return abs(predicted - measured) / measured if predicted and measured else None


def run_rank(send: Send, sizes: Sizes, settings: Sequence[Setting], draws: int, repeats: int) -> None:
    """Measure on this rank; the first one tells constants, then rows."""
    alone = replace(sizes, blocks=1, micro_batches=1, rest_s=0.0)
    constants = calibrated(alone, replace(settings[0], model="M"), repeats)  # other draws than those of the table
    send(constants)
    stage = Waiting(alone)
    for setting in settings:
        for draw, tables in enumerate(routed(setting, replace(alone, blocks=draws), 1)[0]):
            loads = tables[0].tolist()
            for name in CONTENDERS:
                model = LayerModel(constants, overlapped=False)
                lanes = plan(name, loads, model)
                told = model.predict(lanes, loads)
                batches = [stage.batch([tables], {0: lanes}) for _ in range(repeats)]
                samples = [sample_of(batch, 0) for batch in batches]
                for batch, sample in zip(batches, samples, strict=True):  # as a training renews them by its batches
                    constants = renewed(constants, [replace(sample, layer_s=batch.trained_s)])
                constants = replace(  # told
                    constants, forward_row_s=sizes.row_s, backward_row_s=BACKWARD * sizes.row_s, lane_s=0.0
                )
                predicted = dict(zip(PARTS, (
                    told.all_to_all_s, told.compute_s, told.trans_s, told.agg_s, told.blocking_s
                ), strict=True))  # fmt: skip
                measured = dict(zip(PARTS, (
                    median(sample.all_to_all_s or 0.0 for sample in samples),
                    median(max(sample.forward_s or (0.0,)) + max(sample.backward_s or (0.0,)) for sample in samples),
                    median(batch.trans_s[0] for batch in batches), median(batch.agg_s[0] for batch in batches),
                    median(batch.trained_s for batch in batches),
                ), strict=True))  # fmt: skip
                send(Row(setting.top_k, draw, name, predicted, measured))
    stage.close()


def measure(
    sizes: Sizes, *, num_ranks: int = 4, top_k: Sequence[int] = (1, 2), draws: int = 3, repeats: int = 7
) -> Iterator[Constants | Row]:
    """Measure one block alone, with nothing beside its transfers.

    Args:
        sizes: of the block; its rows are those of a rank in a batch.
        num_ranks: R.
        top_k: experts a token.
        draws: of what is routed.
        repeats: of each placement.

    Yields:
        The constants, fitted to other batches; then rows.
    """
    settings = [Setting("S", "HPWNV", num_ranks, sizes.num_experts, k, sizes.rows // k) for k in top_k]
    yield from on_ranks(num_ranks, run_rank, sizes, settings, draws, repeats)


def _costs(constants: Constants) -> str:
    """What was fitted, in words."""
    trans, agg = constants.trans_link, constants.sums_link

    def link(name: str, byte_s: float, message_s: float) -> str:
        return f"{name} {1e9 * byte_s:.2f} ms a MB and {1e3 * message_s:.2f} ms a message"

    return "; ".join([
        link("exchanges", constants.byte_s, constants.message_s),
        f"{link('Trans', trans.byte_s, trans.message_s)}, {1e3 * trans.start_s:.2f} ms to start",
        f"{link('Agg', agg.byte_s, agg.message_s)}, {1e3 * agg.start_s:.2f} ms to start, "
        f"{1e3 * constants.sum_s:.2f} ms to add up",
        f"{1e3 * constants.fixed_s:.2f} ms for begin, counts and end, in the whole layer alone",
    ])  # fmt: skip


def report(sizes: Sizes, constants: Constants, rows: Sequence[Row]) -> tuple[dict[str, Any], str]:
    """Turn rows into values and text.

    Args:
        sizes: of the block.
        constants: what was measured before.
        rows: of :func:`measure`.
    """
    cells = [
        [
            str(row.top_k), str(row.draw + 1), row.placement,
            *(f"{1e3 * row.predicted_s[part]:.1f} / {1e3 * row.measured_s[part]:.1f}" for part in PARTS),
        ]
        for row in rows
    ]  # fmt: skip
    errors = {part: [e for row in rows if (e := row.error(part)) is not None] for part in PARTS}
    means = {part: fmean(found) if found else None for part, found in errors.items()}
    cells.append(["", "", "**mean error**", *("" if mean is None else f"**{mean:.1%}**" for mean in means.values())])
    lines = [
        f"{part}: mean error {mean:.1%} (goal {GOAL:.0%}: {'reached' if mean < GOAL else 'not reached'})."
        for part, mean in means.items() if mean is not None
    ]  # fmt: skip
    text = "\n\n".join([
        "# Predicted against measured seconds of a MoE layer",
        "**SLEEPING REPLAY: experts wait for a time that is told; what travels is real.**",
        f"One block, {sizes.num_experts} experts, {sizes.rows} rows a rank, hidden {sizes.hidden}, width "
        f"{sizes.width}; nothing runs beside Trans and Agg. *Predicted / measured*, ms; measured: medians, of the "
        f"slowest rank. Constants are fitted to other batches at the start, and renewed by each batch after it was "
        f"predicted, as in training. At the start: {1e6 * constants.forward_row_s:.1f} µs a row (told); "
        f"{_costs(constants)}. "
        "The paper's figure is of the first four columns of seconds, on GPUs.",
        table(("k", "draw", "placement", *PARTS), cells),
        "\n".join(f"- {line}" for line in lines),
    ])  # fmt: skip
    values = {
        "sizes": asdict(sizes), "constants": asdict(constants), "mean_error": means,
        "rows": [asdict(row) for row in rows],
    }  # fmt: skip
    return values, text
