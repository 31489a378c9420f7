"""Rules for a whole training. A new one is one new file in this folder; it is found by itself."""
