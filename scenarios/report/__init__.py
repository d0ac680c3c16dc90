"""What a job of :mod:`scenarios.train` came to: ``python -m scenarios.report outputs/freezing`` makes a page of it.

    comparison.py   the table of both runs     pictures.py   the pictures in the output folder
    interval.py     how far off a ratio may be
    results.py      ``results.json`` as values, and what follows from it
    page.py         the page                   figures.py    its pictures

Nothing is imported here, so that who wants the table does not load the plotting library.
"""
