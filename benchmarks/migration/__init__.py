"""What one re-partition costs."""
