"""What crosses from one stage to the next."""
