"""Batches as pictures and traces, text tables, and pages that need no other file; pure functions of plain values.

``timeline`` draws batches; ``page`` is a page, ``themed`` its colours, which pictures share; ``layers`` draws what
layers cost over training; ``run_page`` is the page on one run. The plotting library is loaded when a picture is drawn,
not before.
"""

from dynpipe_ds.reporting.layers import LayerTimes, layers_figure
from dynpipe_ds.reporting.page import Page
from dynpipe_ds.reporting.run_page import add_predictions, run_page
from dynpipe_ds.reporting.table import format_table
from dynpipe_ds.reporting.themed import SERIES, dress, new_figure
from dynpipe_ds.reporting.timeline import around_move, chrome_trace, draw_gantt, save_chrome_trace, save_gantt

__all__ = [
    "SERIES", "LayerTimes", "Page", "add_predictions", "around_move", "chrome_trace", "draw_gantt", "dress",
    "format_table", "layers_figure", "new_figure", "run_page", "save_chrome_trace", "save_gantt",
]  # fmt: skip
