"""An inspection that failed, as files: saved where it failed and run again elsewhere."""
