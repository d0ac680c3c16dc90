"""Going on without a worker that was lost, with the bits of a run in which it was not.

Reading order: :mod:`seats` (who holds which layers from then on; pure), :mod:`survivor` (the operation). Below it are
``ranks/`` (who is lost; breaking off; the meeting), ``host/world.py`` (the next world) and ``snapshots/`` (going back).
"""
