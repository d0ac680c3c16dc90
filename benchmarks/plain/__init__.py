"""What the dynamic engine costs on a model that does not change."""
