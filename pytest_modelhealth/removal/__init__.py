"""Units that can go: found, proven by masking, and cut away."""
