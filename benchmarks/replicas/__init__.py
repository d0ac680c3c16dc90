"""What adding up gradients in the order of the replicas costs."""
