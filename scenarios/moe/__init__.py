"""Mixture of experts: routers, experts, and experts shared by the data-parallel ranks.

Reading order: ``routing`` (which token goes where), ``experts`` (the arithmetic), ``parallel`` (all-to-all),
``layer`` (the block), ``scenario`` (which blocks, counting, the bias). Of experts whose weights ranks share out:
``placing`` (who computes what), ``sharded`` (how that is carried out), ``balancing`` (what happens between batches,
with ``measuring`` and ``telling``).
"""

from scenarios.moe.layer import ExpertConfig, MoEBlock, MoEMLP
from scenarios.moe.parallel import set_expert_group
from scenarios.moe.scenario import MixtureOfExperts

__all__ = ["ExpertConfig", "MixtureOfExperts", "MoEBlock", "MoEMLP", "set_expert_group"]
