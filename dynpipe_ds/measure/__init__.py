"""What layers take in time and memory."""
