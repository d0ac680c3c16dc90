"""Tokens that are predicted confidently leave the model early and do no work in later layers (CALM, ADP-C)."""

from __future__ import annotations

from scenarios.early_exit.scenario import EarlyExit

__all__ = ["EarlyExit"]
