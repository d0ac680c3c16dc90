"""Tests of tables and plots."""
