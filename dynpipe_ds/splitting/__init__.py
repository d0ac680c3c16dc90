"""A backward in two halves: first the gradients of a stage's inputs, later those of its parameters."""

from dynpipe_ds.splitting.graph import CantBeSplit
from dynpipe_ds.splitting.halves import ParameterHalf, backward_inputs

__all__ = ["CantBeSplit", "ParameterHalf", "backward_inputs"]
