"""Models that change while they train: what a user of ``dynpipe_ds`` could have written.

One file or folder a dynamism, and what all of them share: the GPT layers (:mod:`scenarios.gpt`),
the data (:mod:`scenarios.data`), the interface to the training loop (:mod:`scenarios.scenario`),
the kernels (:mod:`scenarios.kernels`), the comparison of a static with a dynamic pipeline
(:mod:`scenarios.compare`), the training entry (:mod:`scenarios.train`) and what it came to
(:mod:`scenarios.report`).
"""

from scenarios.ranks import check_installed, end_quietly, is_entry, quieten

if is_entry():
    end_quietly()
    check_installed()
    quieten()
