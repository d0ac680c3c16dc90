"""Tests of where experts are placed."""
