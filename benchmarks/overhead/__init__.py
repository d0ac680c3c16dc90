"""What the library itself costs: profiling, planning, moving layers, and all of it in every batch."""
