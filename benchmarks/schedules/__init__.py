"""What planned orders, split backwards and messages that nobody waits for bring, in virtual time and for real."""
