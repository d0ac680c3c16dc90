"""``dynpipe demo``: a small GPT whose front half freezes, on two processes, with stages that stay and that move.

Read in this order: ``model.py`` (what is trained, on what, and how), ``rank.py`` (one of the two processes),
``outcome.py`` (what came of it, as text and as values). ``dynpipe_ds/cli/demo.py`` starts the processes and waits.
"""
