"""What it costs to be ready for the loss of a worker, and what a loss costs."""
