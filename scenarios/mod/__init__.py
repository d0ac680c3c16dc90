"""Mixture of Depths: a block computes only the tokens that its router ranks highest."""

from scenarios.mod.block import RoutedBlock
from scenarios.mod.routing import num_chosen, top_tokens
from scenarios.mod.scenario import CapacitySchedule, MixtureOfDepths

__all__ = ["CapacitySchedule", "MixtureOfDepths", "RoutedBlock", "num_chosen", "top_tokens"]
