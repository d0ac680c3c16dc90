"""What profiling every batch costs."""
