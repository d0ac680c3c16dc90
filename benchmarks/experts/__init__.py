"""Experts that move: what planners gain, next to the papers' figures."""
