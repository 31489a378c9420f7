"""Which layer of one model is which of another, whether runs or snapshots show the two."""
