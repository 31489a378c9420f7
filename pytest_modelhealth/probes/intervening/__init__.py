"""What probes do: change a batch, run the model again, and find where two runs part."""
