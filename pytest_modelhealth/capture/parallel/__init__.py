"""Models that `torch.distributed` spreads over ranks: inspected on each, and left as they were.

Nothing here is imported without a process group.
"""
