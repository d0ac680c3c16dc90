"""What all ranks do together: agree, fail together, notice who is lost."""

from dynpipe_ds.ranks.agreement import together
from dynpipe_ds.ranks.guard import explaining_lost_ranks

__all__ = ["explaining_lost_ranks", "together"]
