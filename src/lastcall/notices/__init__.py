"""Where news that the run must stop comes from."""
