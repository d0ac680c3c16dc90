"""``dynpipe doctor --numerics``: whether what is installed trains the model that it was given.

Two processes train a small model with DeepSpeed, cut at several places and moved while it trains; this process trains
the undivided model with torch alone. Losses, gradients, optimizer state and weights are compared. Read in this order:
``model.py`` (what is trained, how, and cut where), ``reference.py``, ``rank.py`` (one of the two
processes), ``compare.py`` (the verdict), ``check.py`` (starts them, waits and says what was found).
"""

from __future__ import annotations

from dynpipe_ds.cli.numerics.check import check_numerics

__all__ = ["check_numerics"]
