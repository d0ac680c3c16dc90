"""A backward in two halves: first the gradients of a stage's inputs, later those of its parameters."""

from dynpipe_ds.splitting.halves import CantBeSplit, ParameterHalf, backward_inputs

__all__ = ["CantBeSplit", "ParameterHalf", "backward_inputs"]
