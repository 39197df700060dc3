"""In the driver: adds the callback, reads the configuration, and gives the run a name that a restart has
too."""
