"""Tests of dynpipe_ds.hf; skipped where transformers is not installed."""
