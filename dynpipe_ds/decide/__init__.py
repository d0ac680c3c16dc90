"""When to move, and where to: pure functions of profiles and costs."""

from dynpipe_ds.decide.balancer import Balancer
from dynpipe_ds.decide.judgement import Decision

__all__ = ["Balancer", "Decision"]
