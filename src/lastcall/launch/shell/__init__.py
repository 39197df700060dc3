"""Shell commands around a training, read and never run."""
