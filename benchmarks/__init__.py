"""Benchmarks: one folder an experiment, each printing its own baseline."""
