"""Re-packing: train on fewer stages when the model has shrunk, and give the freed workers back.

``config`` (the section), ``request`` and ``survivors`` (what a decision is made from), ``decision`` (how few stages
suffice; pure functions).
"""
