"""In the driver: the callback is added, the configuration is read, the run gets a name that a restart has
too."""
