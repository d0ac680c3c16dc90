"""A backward in two halves: first the gradients of a stage's inputs, later those of its parameters."""
