"""Optimizers as DeepSpeed wraps them, and their state."""
