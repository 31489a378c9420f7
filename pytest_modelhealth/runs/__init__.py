"""A run of tests as data: what was inspected, the page made of it, and what two runs differ in."""
