"""A run is pushed to its end, and back to its beginning: that makes most of them shorter.

List scheduling decides in the sequence of time, so it can't see what a choice costs later. Seen from the end of the
batch it can: the same computations are run backwards in time, and each stage prefers what came last before. What a
stage did earlier than anybody needed it, it then does later, and the others close the gaps. The sequence that comes of
it guides a run forwards. Li and Willis 1992, "An iterative scheduling technique for resource-constrained project
scheduling"; Valls et al. 2005, "Justification and RCPSP: A technique that pays".
"""

from __future__ import annotations

from dynpipe_ds.planning.listing import Guide, Listing, list_order, new_ran, new_wires
from dynpipe_ds.planning.runs import Work, run_backwards


def justified(listing: Listing, work: Work, patience: float) -> Listing:
    """Push a run to its end and back.

    Args:
        listing: that came to its end.
        work: that it is of.
        patience: how long a stage waits for what it would rather do, as a share of the seconds of what it could do
            instead.

    Returns:
        What ran then, most often shorter.
    """
    ran = new_ran(work)
    run_backwards(work, Guide.of(listing.table, patience).places, patience, ran, new_wires(work))
    return list_order(work, Guide.of(ran, patience))
