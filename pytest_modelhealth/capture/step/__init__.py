"""One training step: how the batch goes in, what the loss is, and what is put back afterwards."""
