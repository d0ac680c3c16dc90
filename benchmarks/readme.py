"""Write the tables of docs/results.md and docs/elastic.md from ``benchmarks/results/``.

python -m benchmarks.readme            rewrite what stands between the markers
python -m benchmarks.readme --check    say whether they are up to date (exit code 1 if not)
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.elastic import pauses as elastic
from benchmarks.overhead import every_batch, migration, section
from benchmarks.overhead import profiling as profiled
from benchmarks.paper.tables import OUR_LABELS, PAPER_LABELS, VARIANT_LABELS
from benchmarks.record import RESULTS, ROOT, in_words, load, table
from benchmarks.record import head as head_lines
from benchmarks.scenarios.summary import summarise, told


class Part(NamedTuple):
    """What is written into a page.

    Attributes:
        page: its file.
        name: of the markers.
        text: gives what stands between them, of a folder of results.
    """

    page: Path
    name: str
    text: Callable[[Path], str]

    @property
    def markers(self) -> tuple[str, str]:
        """Before and behind it."""
        return f"<!-- {self.name}:begin -->", f"<!-- {self.name}:end -->"

    def insert(self, page: str, text: str) -> str:
        """Put a text between the markers.

        Args:
            page: the whole page.
            text: to insert.

        Raises:
            ValueError: if the markers are missing or in the wrong order.
        """
        before, after = self.markers
        begin, end = page.find(before), page.find(after)
        if not 0 <= begin < end:
            raise ValueError(
                f"docs/{self.page.name} needs {before} and, after it, {after}: the table goes between them"
            )
        return f"{page[:begin + len(before)]}\n{text}\n{page[end:]}"


def performance(results: Path = RESULTS) -> str:
    """The text between the markers.

    Args:
        results: folder of all results.

    Returns:
        Markdown; what was never measured is left out.
    """
    about, told_of, head, cells = _scenarios(load(results / "scenarios", "scenarios"))
    replayed, kinds, speedups = _replay(load(results / "paper", "throughput"))
    names = list(dict.fromkeys([*cells, *speedups]))
    rows = [
        [f"`{name}`", *cells.get(name, [""] * len(head)), *(speedups.get(name, {}).get(count, "") for count in kinds)]
        for name in names
    ]
    columns = ("`SCENARIO=`", *head, *(f"{kind}, {count} stages" for count, kind in kinds.items()))
    one = [table(columns, rows)] if rows else []
    parts = [*about[:-1], *told_of, *replayed, *one, *about[-1:], _overhead(results / "overhead")]
    return "\n\n".join(part for part in parts if part) or "Not measured yet: `make bench`."


def _scenarios(values: dict[str, Any] | None) -> tuple[list[str], list[str], tuple[str, ...], dict[str, list[str]]]:
    """Lines about the machine, of which the last stands below, words, columns, and cells by scenario."""
    if values is None:
        return [], [], (), {}
    cells = {}
    for name, scenario in values["scenarios"].items():
        s = summarise(scenario)
        cells[name] = [
            f"{s.tokens_per_s[s.best_static].median:,.0f}", f"{s.tokens_per_s['ours'].median:,.0f}", told(s.speedup),
            f"{s.share.median:.0%} ({s.cut_share.median:.0%})", told(s.whole_speedup), f"{s.overhead:.2%}",
        ]
    head = (
        "best static, tokens/s", "ours", "speedup (95% interval)", "of the ideal (the cut alone)",
        "speedup, whole run (95% interval)", "own overhead",
    )
    words = (
        f"Conditions: two stages of one thread, real compute, {scenario['num_batches']} batches a run. The runs take "
        "turns. *Best static*: the better of `uniform` and `parameters`. *Ideal*: the best partition of the measured "
        "times of layers and micro-batches, chosen with hindsight, with fill and drain and without overhead. In "
        "brackets: the share our partition would reach without communication or overhead. *Speedup*: from the seconds "
        "of the last windows. *Whole run*: from all timed windows. Each window is one pair of the interval."
    )
    about = values["environment"]
    return [*head_lines(about), f"{in_words(about)}."], [words], head, cells


def _replay(report: dict[str, Any] | None) -> tuple[list[str], dict[int, str], dict[str, dict[int, str]]]:
    """Words, what was done for which number of stages, and cells by load model and stages."""
    if report is None:
        return [], {}, {}
    kinds = {row["stages"]: row.get("kind", "replay") for row in report["values"]}
    by_scenario: dict[str, dict[int, str]] = {}
    balancers = {*PAPER_LABELS, *VARIANT_LABELS, "diffusion:time", "diffusion:parameters"}  # the last: older results
    for row in sorted(report["values"], key=lambda row: -row.get("blocks", 0)):  # of several depths, the smallest
        ours, theirs = (max((x for k, x in row["speedups"].items() if k in labels), default=0.0)
                        for labels in (OUR_LABELS, balancers))  # fmt: skip
        cell = f"**{ours:.2f}x**, {theirs:.2f}x, {row['reached']:.0%}"
        by_scenario.setdefault(row["scenario"], {})[row["stages"]] = cell
    shown = sorted(count for count in kinds if all(count in cells for cells in by_scenario.values()))
    words = (
        "*Replay* covers more stages than cores. It is the real engine with real messages, decisions and moves in "
        "virtual time. A load model gives the time of each layer. Everything else is a calibrated constant. A cell has "
        "our speedup over the best static partition, the speedup of the best other balancer, and our share of the "
        "ideal (every batch on its best partition, without overhead). In *simulation* the "
        "engine's balancer decides alike, and batches are computed. Two runs give the same cells, so there are no "
        "intervals. A load model changes by other amounts than the scenario of the same name. All tables, beside the "
        "paper's figures, are in `benchmarks/results/paper`."
    )
    return [words], {count: kinds[count] for count in shown}, by_scenario


def _overhead(folder: Path) -> str:
    lines = []
    profiling, moves = load(folder, "profiling"), load(folder, migration.NAME)
    batches, sections = load(folder, every_batch.NAME), load(folder, section.NAME)
    if profiling is not None:
        more = profiled.more(profiling).text("+.1%", "")
        share = profiling["accounted_s"] / sum(profiling["with_s"])
        lines.append(f"- profiling every batch: {more} by paired batches, {share:.2%} by its own accounting")
    for row in sections["rows"] if sections is not None else []:
        lines.append(
            f"- the section as shipped, model unchanging ({row['model']}: blocks x hidden x length; batches "
            f"of {1e3 * statistics.median(row['wall_s'][section.PLAIN]):.0f} ms): "
            f"{section.more(row, 'auto', 'wall_s').text('+.1%', '')} by paired batches, profiling "
            f"{row['spent_s']['auto'][0] / sum(row['wall_s']['auto']):.2%} by its own accounting"
        )
    if moves is not None:
        rows = [r for r in moves["rows"] if r["layer_bytes"] >= migration.LEAST_BYTES and r["cross_memory"]]
        rates = ", ".join(
            f"{row['optimizer']} {1e3 * statistics.median(row['move_s']):.0f} ms for {row['bytes_moved'] / 1e6:.0f} MB "
            f"({migration.rate(row).value:.0%})"
            for row in rows
        )
        lines.append(f"- moving one layer, and its rate against one plain `send` and `recv` of the same bytes: {rates}")
    if batches is not None:
        shares = ", ".join(
            f"{row['scenario'].replace('_', ' ')} {every_batch.share_at_goal(row):.1%}"
            for row in batches["rows"] if not row["always"]
        )
        lines.append(f"- deciding after every batch, at 20 ms a layer: {shares}")
    return "What the library itself costs:\n\n" + "\n".join(lines) if lines else ""


def pauses(results: Path = RESULTS) -> str:
    """Seconds of pause when workers come and go.

    Args:
        results: folder of all results.

    Returns:
        Markdown.
    """
    values = load(results / "elastic", elastic.NAME)
    if values is None:
        return "Not measured yet: `python -m benchmarks.elastic.main pauses`."
    about = values["environment"]
    return "\n\n".join([*head_lines(about), elastic.summary(values), f"{in_words(about)}."])


PARTS = (
    Part(ROOT / "docs" / "results.md", "performance", performance),
    Part(ROOT / "docs" / "elastic.md", "pauses", pauses),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if one is out of date")
    options = parser.parse_args()
    old = []
    for part in PARTS:
        before = part.page.read_text(encoding="utf-8")
        after = part.insert(before, part.text(RESULTS))
        if before != after:
            old.append(f"docs/{part.page.name}")
            if not options.check:
                part.page.write_text(after, encoding="utf-8")
    if options.check and old:
        sys.exit(f"{', '.join(old)}: out of date: python -m benchmarks.readme")


if __name__ == "__main__":
    main()
