"""Simulated against measured batch times."""
