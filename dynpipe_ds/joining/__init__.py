"""Joining: workers enter a job that trains, and its pipeline gets longer between two batches.

``config`` (the section), ``wire`` (lines between two processes that know the same token), ``papers`` (proof that a
newcomer fits), ``address`` (where to knock), ``door`` (the job's side: who waits) and ``newcomer`` (the other side),
``adopting`` (what a newcomer takes over), ``grow`` and ``entering`` (the operation, as the present ranks and as the
newcomers do it).
"""
