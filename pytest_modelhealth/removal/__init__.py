"""Units that can go: looked for in what batches show, and proven by masking."""
