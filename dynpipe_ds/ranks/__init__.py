"""What all ranks do together: agree, fail together, notice who is lost, and where they meet on one machine."""

from dynpipe_ds.ports import ANY_PORT, reserved_port
from dynpipe_ds.ranks.agreement import together
from dynpipe_ds.ranks.guard import explaining_lost_ranks

__all__ = ["ANY_PORT", "explaining_lost_ranks", "reserved_port", "together"]
