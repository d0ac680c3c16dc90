"""Save time of checkpoints."""
