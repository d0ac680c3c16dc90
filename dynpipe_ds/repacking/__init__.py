"""Re-packing: train on fewer stages when the model has shrunk, and give the freed workers back.

``config`` (the section), ``decision`` (how few stages suffice; pure functions).
"""
