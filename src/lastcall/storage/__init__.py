"""Where checkpoints live: the local file system, and space kept ready on it."""
