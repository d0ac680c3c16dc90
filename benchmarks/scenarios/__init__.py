"""All scenarios with real compute, next to static partitions and to the best one with hindsight."""
