"""Models spread over ranks: inspected on each, and left as they were."""
