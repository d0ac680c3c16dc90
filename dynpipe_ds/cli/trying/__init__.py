"""``dynpipe try``: an existing script with DeepSpeed's class, with ours, and with ours while layers move.

The command starts the user's own start command with a folder first on ``PYTHONPATH`` whose ``sitecustomize.py`` waits
for DeepSpeed to be imported. Read in this order: ``settings.py`` (what a run is told), ``startup.py`` (that file),
``install.py`` (what it changes in the script's processes), ``watch.py``, ``record.py``, ``moves.py`` and ``weights.py``
(what they record), then the side of the command: ``outcome.py`` (what was recorded, and where two runs differ),
``reasons.py`` (why, found by running once more), ``trial.py`` (start, wait, end; all of it in order), ``text.py``.
"""
