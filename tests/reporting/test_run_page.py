"""The page on a run: what it says is what was computed by hand; in a browser, wide and narrow, light and dark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dynpipe_ds.events import RepackEvent
from dynpipe_ds.journal import Journal, read_journal
from dynpipe_ds.reporting import run_page
from dynpipe_ds.reporting.layers import LayerTimes
from tests.browser import WIDTHS, browser, check_layout, least_contrast, shown
from tests.docs.pages import blocks
from tests.journal.told import Job
from tests.reporting.test_page import Parsed


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    Job(tmp_path / "runs" / "first", settings={"enabled": True, "min_gain": 0.01}).write(range(30))
    return read_journal(tmp_path)


def cells(text: str, heading: str) -> list[list[str]]:
    """The table below a heading, without its head."""
    body = text[text.index(f"<h2>{heading}") :].partition("</table>")[0].partition("<tbody>")[2]
    rows = re.findall(r"<tr.*?>(.*?)</tr>", body)
    return [[re.sub("<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", row)] for row in rows]


def test_what_it_says(journal: Journal) -> None:
    text = run_page(journal).render()
    parsed = Parsed(text)
    assert not parsed.open and len(parsed.ids) == len(set(parsed.ids))
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in parsed.loaded)
    assert "<h1>Run: first</h1>" in text
    assert "30 batches with 1 change of partition; idle share 14.3% at first, 27.3% at the end." in text
    assert cells(text, "Stages at the end") == [
        ["0", "0–4", "280 ms", "120 ms", "40 ms", "20 ms", "36.4%", "1 MiB"],
        ["1", "5–7", "360 ms", "40 ms", "40 ms", "20 ms", "18.2%", "2 MiB"],
    ]
    assert cells(text, "Changes of partition") == [["16", "[0 4 8]", "[0 5 8]", "12.5%", "3.0 MiB", "210 ms"]]
    assert text.count("<svg") == 6 and "Orders: 1F1B from batch 0, planned from batch 16." in text
    assert "&quot;min_gain&quot;" in text and "read from" in text


def test_what_layers_take_to_compile_where_they_arrive(tmp_path: Path) -> None:
    Job(tmp_path, compiles={0: 4.0, 16: 1.25}).write(range(30))
    text = run_page(read_journal(tmp_path)).render()
    assert cells(text, "Changes of partition")[0][-2:] == ["210 ms", "1.25 s"]
    assert "Compiled: seconds of torch.compile on the slowest rank" in text


def test_a_batch_under_other_partitions_and_orders(journal: Journal) -> None:
    """As ``predict_batches`` says; the shortest stands out."""
    rows = cells(run_page(journal).render(), "A batch under other partitions and orders")
    assert [row[:3] for row in rows[:5]] == [
        ["as it began", "1F1B", "[0 4 8]"], ["as many layers a stage", "1F1B", "[0 4 8]"],
        ["as many parameters a stage", "1F1B", "[0 4 8]"], ["as it is now", "1F1B", "[0 5 8]"],
        ["best cut by time", "1F1B", "[0 5 8]"],
    ]  # fmt: skip
    assert [row[1] for row in rows[5:]] == ["planned", "planned"] and rows[3][4] == "the same"
    assert rows[0][4].startswith("+") and rows[6][4].startswith("−")


def test_a_run_without_profiles_or_moves(tmp_path: Path) -> None:
    """What is not known is left out."""
    Job(tmp_path, moved_at=99).write(range(1, 4), profile_every=10)
    text = run_page(read_journal(tmp_path)).render()
    assert "3 batches with 0 changes of partition." in text and "Layers stayed where they were." in text
    assert "A batch under other" not in text and text.count("<svg") == 2
    Job(tmp_path, moved_at=99).write(range(2))
    assert "0 changes" in run_page(read_journal(tmp_path)).render()


def test_fewer_workers_are_told(journal: Journal) -> None:
    journal.repacks.append(RepackEvent(20, (0, 4, 8), (0, 8), (1,), False, "it fits", 0.1, 0.2, 0.3))
    assert "<p>Re-packed after batch 20 from 2 to 1 stages: " in run_page(journal).render()


def test_a_long_run_fits_into_a_picture(tmp_path: Path) -> None:
    """Rows are means of neighbours; every batch is in one of them."""
    Job(tmp_path, frozen_at=600, moved_at=602).write(range(1200))
    times = LayerTimes.of(read_journal(tmp_path))
    assert len(times.rows) == 400 and times.batches[:3] == (0, 3, 6) and times.end == 1200
    assert times.rows[0][0] == pytest.approx(0.03) and times.rows[-1][0] == pytest.approx(0.01)
    assert times.partitions == ((0, (0, 4, 8)), (602, (0, 5, 8)))


def test_the_block_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """docs/watch.md: a line for every partition and order."""
    monkeypatch.chdir(tmp_path)
    Job(Path("runs/first")).write(range(20))
    (block,) = blocks("docs/watch.md", "python")
    exec(compile(block.code, str(block), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 7 and printed[3].startswith("as it is now 1F1B (0, 5, 8) 0.4")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(tmp_path: Path, journal: Journal, scheme: str) -> None:
    file = run_page(journal).save(tmp_path / "page.html")
    with browser() as opened:
        for width in WIDTHS:
            with shown(opened, file, width, scheme) as seen:
                check_layout(seen)
                assert least_contrast(seen) >= 4.5
