"""The only folder that knows DeepSpeed's inside."""
