"""Replay: the real engine with layers that wait as long as a trace says. They do not compute: see README.md."""
