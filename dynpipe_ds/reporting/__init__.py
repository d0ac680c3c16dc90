"""Simulated batches as pictures and traces, and text tables; pure functions of plain values.

The plotting library is loaded when a picture is drawn, not before.
"""

from dynpipe_ds.reporting.table import format_table
from dynpipe_ds.reporting.timeline import around_move, chrome_trace, save_chrome_trace, save_gantt

__all__ = ["around_move", "chrome_trace", "format_table", "save_chrome_trace", "save_gantt"]
