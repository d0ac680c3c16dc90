"""Copies of every worker's state in the host memory of other workers, and going back to one of them.

Words: a *snapshot* is everything that batches depend on, of one worker, after so many trained batches. Its *owner* is
the worker that it is of, by stage and replica; its *holder* is a worker that has a copy: the owner itself, and one
neighbour. A snapshot of a batch can be gone back to when the copies that are left hold all of every owner.

Reading order: :mod:`inventory` (the values: what is held, which batch is common, who gives what to whom),
:mod:`neighbours` and :mod:`interval` (who holds whose copy, and how often; pure), :mod:`store` (host memory),
:mod:`capture` (a worker's state as named tensors and plain values), :mod:`transfer` (to the neighbour, in a thread),
:mod:`taking` (what the training loop calls), :mod:`restore` (going back; collective).
"""

from __future__ import annotations
