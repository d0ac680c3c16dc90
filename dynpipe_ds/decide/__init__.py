"""When to move, and where to: pure functions of profiles and costs."""
