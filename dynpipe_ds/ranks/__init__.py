"""What all ranks do together: agree, fail together, notice who is lost."""
