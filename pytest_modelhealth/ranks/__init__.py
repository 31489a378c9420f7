"""Several processes, one report; imported only where there is a process group."""
