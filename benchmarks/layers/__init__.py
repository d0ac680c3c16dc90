"""What scenarios save in one layer, forward and backward."""
