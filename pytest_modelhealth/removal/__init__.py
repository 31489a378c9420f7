"""Units that can go: found, and proven by masking."""
