"""A run's journal: what ``dynpipe watch`` shows while a job trains, and ``dynpipe report`` when it is over.

``write`` appends lines to a file while a job trains; ``read`` makes a :class:`Journal` of them, also while they are
being written; ``lines`` is the form of both. The file is ``journal.jsonl`` in the folder that the section's key
``journal`` names: a JSON object a line, whose ``kind`` is ``begin``, ``start``, ``batch``, ``profile``, ``move``,
``repack`` or ``end``.
"""

from dynpipe_ds.journal.read import BatchTold, Journal, ProfileTold, find_journals, read_journal

__all__ = ["BatchTold", "Journal", "ProfileTold", "find_journals", "read_journal"]
